"""Who may reach whom: the policies allow what services do to each other, and nothing else."""

from typing import Any

import pytest

from tests.deploy.rendering import PYTHON, VALUES, VARIANTS, Container, containers, of_kind

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make .charts/.ready")

SERVICES = ("gateway", "batcher", "shard_worker", "kvstore")
BUS = {"app.kubernetes.io/name": "nats", "app.kubernetes.io/instance": "shoal"}
STRANGER = {"app": "somebody-else"}
# (who, whom, the port's name): formation and control, blocks, activations, results, tiers
CALLS = {
    ("batcher", "shard_worker", "ring"),
    ("batcher", "shard_worker", "rpc"),
    ("batcher", "kvstore", "rpc"),
    ("shard_worker", "shard_worker", "ring"),
    ("shard_worker", "batcher", "results"),
    ("kvstore", "shard_worker", "ring"),
}


def policies(name: str) -> dict[str, dict[str, Any]]:
    """By the component that they are for."""
    return {
        p["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component", "nats"): p["spec"]
        for p in of_kind(name, "NetworkPolicy")
    }


def lets(rules: list[dict[str, Any]], side: str, labels: dict[str, str] | None, port: int) -> bool:
    """Whether any rule lets a pod with these labels (None: an address elsewhere) use the port."""
    for rule in rules:
        ports = [p["port"] for p in rule.get("ports", [])]
        if ports and port not in ports:
            continue
        if side not in rule:
            return True
        for peer in rule[side]:
            chosen = peer.get("podSelector", {}).get("matchLabels")
            if labels is not None and chosen is not None and chosen.items() <= labels.items():
                return True
    return False


def one_of(name: str) -> dict[str, Container]:
    return {container.component: container for container in containers(name)}


@pytest.mark.parametrize("name", [*VALUES, *sorted(VARIANTS.keys() - {"long"})])
def test_both_ends_let_through_what_services_do_and_no_more(name: str) -> None:
    rules, pods = policies(name), one_of(name)
    rdma = name == "rdma"
    for who in SERVICES:
        for whom in SERVICES:
            for port_name, port in pods[whom].ports.items():
                out = lets(rules[who]["egress"], "to", pods[whom].labels, port)
                into = lets(rules[whom]["ingress"], "from", pods[who].labels, port)
                through = out and into
                if port_name in ("grpc", "http", "metrics"):
                    continue  # of clients and scrapers, below
                wanted = (who, whom, port_name) in CALLS
                if rdma and whom == "shard_worker" and who != "gateway":
                    wanted = True  # UCX takes any port
                assert through == wanted, (who, whom, port_name)


@pytest.mark.parametrize("name", [*VALUES, "plain", "scaled"])
def test_strangers_reach_doors_and_metrics_only(name: str) -> None:
    rules, pods = policies(name), one_of(name)
    for whom in SERVICES:
        for port_name, port in pods[whom].ports.items():
            reached = lets(rules[whom]["ingress"], "from", STRANGER, port)
            assert reached == (port_name in ("grpc", "http", "metrics")), (whom, port_name)
        assert not lets(rules[whom]["egress"], "to", STRANGER, 443)


@pytest.mark.parametrize("name", [*VALUES, "plain"])
def test_the_bus_is_for_us(name: str) -> None:
    rules, pods = policies(name), one_of(name)
    for who in SERVICES:
        assert lets(rules[who]["egress"], "to", BUS, 4222)
        assert lets(rules["nats"]["ingress"], "from", pods[who].labels, 4222)
    assert lets(rules["nats"]["ingress"], "from", BUS, 6222), "servers of a cluster"
    assert not lets(rules["nats"]["ingress"], "from", STRANGER, 4222)
    assert not lets(rules["nats"]["ingress"], "from", STRANGER, 6222)


def test_the_autoscaler_hears_the_bus_and_is_read() -> None:
    rules, pods = policies("guarded"), one_of("guarded")
    assert lets(rules["autoscale"]["egress"], "to", BUS, 4222)
    assert lets(rules["nats"]["ingress"], "from", pods["autoscale"].labels, 4222)
    assert lets(rules["autoscale"]["ingress"], "from", STRANGER, pods["autoscale"].ports["metrics"])
    for whom in SERVICES:
        reached = [
            p
            for p in pods[whom].ports.values()
            if lets(rules["autoscale"]["egress"], "to", pods[whom].labels, p)
        ]
        assert reached == []


def test_a_bus_elsewhere_is_reached_at_its_own_ports() -> None:
    """One that names none has NATS's own."""
    (rule,) = [rule for rule in policies("theirs")["gateway"]["egress"] if "ipBlock" in str(rule.get("to"))]
    assert [port["port"] for port in rule["ports"]] == [4222, 14222]


def test_peers_that_are_named() -> None:
    rules = policies("theirs")
    assert set(rules) == set(SERVICES), "nothing guards a bus that is not ours"
    (to_bus,) = [r for r in rules["batcher"]["egress"] if r.get("ports", [{}])[0].get("port") == 4222]
    assert to_bus["to"] == [{"ipBlock": {"cidr": "198.51.100.0/24"}}]
    doors = [r for r in rules["gateway"]["ingress"] if {p["port"] for p in r["ports"]} & {50051, 8000}]
    assert [r["from"] for r in doors] == [[{"ipBlock": {"cidr": "192.0.2.0/24"}}]]


def test_spans_may_leave_where_they_are_sent() -> None:
    for who, rules in policies("scaled").items():
        assert who == "nats" or lets(rules["egress"], "to", STRANGER, 4317), who
    assert not lets(policies("plain")["gateway"]["egress"], "to", STRANGER, 4317)
