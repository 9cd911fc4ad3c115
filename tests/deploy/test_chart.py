"""The chart renders with each file of values into what Kubernetes takes, and refuses what is wrong."""

import json
import re
from typing import Any

import pytest

from chassis.subjects import LAYOUT, PRIORITIES, REQUESTS, consumer_name
from shoal.autoscale.meters import PIPELINES_WANTED
from tests.deploy.rendering import (
    CHART,
    ODD_NAME,
    PYTHON,
    REFUSED,
    VALUES,
    VARIANTS,
    Container,
    containers,
    documents,
    everything,
    of_kind,
)
from tests.deploy.settings import config_of_toml, unknown_settings

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make .charts/.ready")

WHOLE = [*VALUES, *VARIANTS]
each = pytest.mark.parametrize("name", WHOLE)


@each
def test_kubernetes_takes_it(name: str) -> None:
    render = everything()["renders"][name]
    assert not render["error"], render["error"]
    assert render["documents"]
    assert render["complaints"] == []


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_by_its_name(what: str) -> None:
    render = everything()["renders"][f"refused: {what}"]
    assert REFUSED[what][1] in render["error"], render["error"] or "it was taken"


def test_the_schemas_of_strangers_refuse_what_is_wrong() -> None:
    """Else the test above says nothing of those."""
    kinds = {document["kind"] for name in WHOLE for document in documents(name)}
    assert {"ScaledObject", "ServiceMonitor", "NetworkPolicy", "PodDisruptionBudget"} <= kinds
    assert {"Deployment", "StatefulSet", "Service", "HorizontalPodAutoscaler", "ConfigMap"} <= kinds


@each
def test_names_are_unique_and_short_enough(name: str) -> None:
    found = [(d["kind"], d["metadata"]["name"]) for d in documents(name)]
    assert len(found) == len(set(found))
    for kind, own in found:  # a set's revisions are labels, with eleven characters more
        assert len(own) <= (52 if kind == "StatefulSet" else 63), own


@each
def test_services_take_their_configuration(name: str) -> None:
    """Each pod's own item of the ConfigMap, its environment over it, as the service itself reads both."""
    (map_,) = of_kind(name, "ConfigMap")
    for container in containers(name):
        section = container.component
        chassis, config = config_of_toml(section, item_of(container, map_), container.env("192.0.2.7"))
        assert chassis.metrics_address == f"0.0.0.0:{container.ports['metrics']}"
        assert unknown_settings(section, container.env("192.0.2.7")) == []
        if section == "batcher":
            assert config.listen == f"tcp://192.0.2.7:{container.ports['results']}"
        if section == "shard_worker":
            assert config.listen == f"tcp://0.0.0.0:{container.ports['ring']}"
            assert config.rpc_listen == f"0.0.0.0:{container.ports['rpc']}"
            assert config.advertise_host == "192.0.2.7"
            stage = container.labels["shoal/stage"]
            assert config.preferred_stage == (None if stage == "spare" else int(stage))
        if section == "kvstore":
            assert config.rpc_address == f"0.0.0.0:{container.ports['rpc']}"
            assert config.advertise_address == f"192.0.2.7:{container.ports['rpc']}"
        if section == "gateway":
            assert config.grpc_address == f"0.0.0.0:{container.ports['grpc']}"
            assert config.http_address == f"0.0.0.0:{container.ports['http']}"


def item_of(container: Container, map_: dict[str, Any]) -> str:
    (volume,) = [v for v in container.pod["volumes"] if v["name"] == "config"]
    assert volume["configMap"]["name"] == map_["metadata"]["name"]
    (item,) = volume["configMap"]["items"]
    (mount,) = [m for m in container.spec["volumeMounts"] if m["name"] == "config"]
    assert item["path"] == mount["subPath"]
    assert container.spec["args"] == ["--config", mount["mountPath"]]
    return str(map_["data"][item["key"]])


def test_values_keep_their_types_and_the_last_word_counts() -> None:
    (map_,) = of_kind("types", "ConfigMap")
    by_component = {container.component: container for container in containers("types")}
    _, gateway = config_of_toml("gateway", item_of(by_component["gateway"], map_), {})
    assert (gateway.prompt_bytes_max, gateway.operators) == (1_000_000, ("a", "b"))
    _, batcher = config_of_toml("batcher", item_of(by_component["batcher"], map_), {})
    assert batcher.batch_class is False and batcher.preferred_batch_size == (4, 8)
    assert batcher.slowdown_max == 0, "a pipeline's own, although it is nothing"
    assert batcher.batch_share == 0.125
    assert dict(batcher.tenant_weights) == {"acme co.": 2.5, "x": 1.0}
    assert batcher.queue_policies[9].max_queue_size == 100


@each
def test_probes_ask_what_the_service_answers(name: str) -> None:
    for container in containers(name):
        for probe, path in (
            ("startupProbe", "/live"),
            ("livenessProbe", "/live"),
            ("readinessProbe", "/ready"),
        ):
            asked = container.spec[probe]["httpGet"]
            assert asked == {"path": path, "port": "metrics"}, probe
        assert container.spec["startupProbe"]["failureThreshold"] >= 30


@each
def test_pods_are_given_the_time_to_drain(name: str) -> None:
    (map_,) = of_kind(name, "ConfigMap")
    for container in containers(name):
        chassis, config = config_of_toml(container.component, item_of(container, map_), {})
        wait_s = chassis.drain_timeout_s + 5
        hook = container.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])
        wait_s += sum(map(int, re.findall(r"sleep\((\d+)\)", hook[-1])))
        assert container.pod["terminationGracePeriodSeconds"] >= wait_s
        own = {"gateway": "drain_wait_s", "shard_worker": "drain_wait_ms", "batcher": "drain_timeout_ms"}
        if field := own.get(container.component):
            in_s = getattr(config, field) / (1000 if field.endswith("_ms") else 1)
            assert in_s <= chassis.drain_timeout_s, "else it is cut short"


@each
def test_pods_may_do_little(name: str) -> None:
    for container in containers(name):
        pod, spec = container.pod, container.spec
        assert pod["enableServiceLinks"] is False, "SHOAL_GATEWAY_PORT would be an unknown setting"
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        within = spec["securityContext"]
        assert within["readOnlyRootFilesystem"] and not within["allowPrivilegeEscalation"]
        assert within["capabilities"]["drop"] == ["ALL"]
        assert "memory" in spec["resources"]["limits"]


def test_service_links_would_be_refused() -> None:
    """Why enableServiceLinks is off: Kubernetes would set this for a Service `shoal-gateway`."""
    assert unknown_settings("gateway", {"SHOAL_GATEWAY_PORT": "tcp://10.0.0.1:50051"}) == [
        "SHOAL_GATEWAY_PORT"
    ]


@each
def test_every_set_has_its_mounts_and_volumes(name: str) -> None:
    for container in containers(name):
        claims = {c["metadata"]["name"] for c in container.owner["spec"].get("volumeClaimTemplates", [])}
        volumes = [v["name"] for v in container.pod.get("volumes", [])]
        assert len(volumes) == len(set(volumes))
        mounts = {m["name"] for m in container.spec["volumeMounts"]}
        assert mounts == {*volumes, *claims}
        paths = [m["mountPath"] for m in container.spec["volumeMounts"]]
        assert len(paths) == len(set(paths))


@each
def test_selectors_choose_their_own_pods(name: str) -> None:
    everyone = list(containers(name))
    for container in everyone:
        chosen = container.owner["spec"]["selector"]["matchLabels"].items()
        assert [c.name for c in everyone if chosen <= c.labels.items()] == [container.name]
    for budget in of_kind(name, "PodDisruptionBudget"):
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        assert len([c for c in everyone if chosen <= c.labels.items()]) == 1, budget["metadata"]["name"]
    names = {s["metadata"]["name"]: s for s in of_kind(name, "Service")}
    for container in everyone:
        if container.owner["kind"] == "StatefulSet":
            service = names[container.owner["spec"]["serviceName"]]
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["selector"].items() <= container.labels.items()
    for service in names.values():
        chosen_by = [c for c in everyone if service["spec"]["selector"].items() <= c.labels.items()]
        assert chosen_by, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert all(c.ports[port["targetPort"]] == port["port"] for c in chosen_by)


def test_metrics_are_not_on_the_service_of_clients() -> None:
    (front,) = [s for s in of_kind("plain", "Service") if s["metadata"]["name"].endswith("-gateway")]
    assert {port["name"] for port in front["spec"]["ports"]} == {"grpc", "http"}


@pytest.mark.parametrize("name", ["gpu", "rdma"])
def test_a_monitor_finds_every_pod_once(name: str) -> None:
    (monitor,) = of_kind(name, "ServiceMonitor")
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    services = [s for s in of_kind(name, "Service") if chosen <= s["metadata"]["labels"].items()]
    for container in containers(name):
        scraped = [s for s in services if s["spec"]["selector"].items() <= container.labels.items()]
        assert len(scraped) == 1, container.name
        assert scraped[0]["spec"]["ports"] == [{"name": "metrics", "port": 9464, "targetPort": "metrics"}]
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == {"metrics"}


def test_scaling_asks_the_stream_of_requests() -> None:
    """All priorities of the model, by the names that batchers give their consumers."""
    scaled = of_kind("scaled", "ScaledObject")
    sets = {c.name: c for c in containers("scaled")}
    assert len(scaled) == 4, "a batcher and three stages"
    for one in scaled:
        target = sets[one["spec"]["scaleTargetRef"]["name"]]
        assert target.owner["kind"] == one["spec"]["scaleTargetRef"]["kind"]
        assert "replicas" not in target.owner["spec"], "two would decide"
        triggers = one["spec"]["triggers"]
        assert {t["metadata"]["stream"] for t in triggers} == {REQUESTS}
        assert [t["metadata"]["consumer"] for t in triggers] == [
            consumer_name(ODD_NAME, p) for p in PRIORITIES
        ]
        names = [t["name"] for t in triggers]
        assert one["spec"]["advanced"]["scalingModifiers"]["formula"].split(" + ") == names
        assert (one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]) == (0, 6)
    assert len({str({**one["spec"], "scaleTargetRef": None}) for one in scaled}) == 1, (
        "they follow one number"
    )
    assert "replicas" in sets[next(n for n in sets if n.endswith("-spare"))].owner["spec"]


def test_scaling_by_our_own_number_asks_the_autoscaler() -> None:
    (map_,) = of_kind("guarded", "ConfigMap")
    (ours,) = [c for c in containers("guarded") if c.component == "autoscale"]
    _, config = config_of_toml("autoscale", item_of(ours, map_), {})
    assert (config.model, config.pipelines_min, config.pipelines_max) == ("smollm2", 0, 4)
    assert config.ttft_objective_ms == 1500
    scaled = of_kind("guarded", "ScaledObject")
    sets = {c.name for c in containers("guarded") if c.component in ("batcher", "shard_worker")}
    assert {one["spec"]["scaleTargetRef"]["name"] for one in scaled} == sets
    for one in scaled:
        (trigger,) = one["spec"]["triggers"]
        asked = trigger["metadata"]
        assert asked["url"] == f"http://{ours.name}.serving:{ours.ports['metrics']}/metrics"
        assert (asked["valueLocation"], asked["targetValue"]) == (PIPELINES_WANTED, "1")
        assert (one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]) == (0, 4)
    (service,) = [s for s in of_kind("guarded", "Service") if s["metadata"]["name"] == ours.name]
    assert not service["spec"].get("publishNotReadyAddresses"), "it is asked once it knows"


def test_every_value_has_a_default_and_a_rule() -> None:
    """A rule without a default would be of a value that nobody finds; a default without a rule is refused."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = everything()["files"][str(CHART / "values.yaml")]

    def walk(rule: dict[str, Any], value: Any, where: str) -> None:
        if "$ref" in rule:
            rule = schema["definitions"][rule["$ref"].rpartition("/")[2]]
        for name, inner in rule.get("properties", {}).items():
            if (where, name) in FREE:
                continue
            assert name in value, f"{where}.{name}"
            walk(inner, value[name], f"{where}.{name}")

    walk(schema, defaults, "")


# of the chart of NATS, of Helm, and what a service has a default for itself
FREE = {("", "global"), (".config.chassis", "drain_timeout_s")}


def test_the_volume_of_the_bus_holds_all_streams_at_their_bounds() -> None:
    """A server refuses to make a stream whose bound does not fit beside the others'."""
    bounds = sum(stream.bytes_max for stream in LAYOUT)
    sizes = {"Gi": 1 << 30, "Ti": 1 << 40}
    text = (CHART / "values.yaml").read_text()
    found = re.search(r"nats:\n.*?pvc:\n +size: (\d+)(\w+)", text, re.DOTALL)
    assert found and int(found.group(1)) * sizes[found.group(2)] > bounds


@pytest.mark.parametrize("name", [*VALUES, "types"])
def test_a_tier_fits_on_its_volume(name: str) -> None:
    sizes = {"Gi": 1 << 30, "Ti": 1 << 40}
    (map_,) = of_kind(name, "ConfigMap")
    (kvstore,) = [c for c in containers(name) if c.component == "kvstore"]
    _, config = config_of_toml("kvstore", item_of(kvstore, map_), {})
    claims = kvstore.owner["spec"].get("volumeClaimTemplates", [])
    assert bool(claims) == bool(config.disk_bytes)
    mount = next(m for m in kvstore.spec["volumeMounts"] if m["name"] == "blocks")["mountPath"]
    if claims:
        size = claims[0]["spec"]["resources"]["requests"]["storage"]
        assert config.disk_bytes <= 0.9 * int(size[:-2]) * sizes[size[-2:]]
        assert config.disk_dir.startswith(mount + "/")
    assert kvstore.owner["kind"] == "StatefulSet"  # its pods' names stay, and pools return to them by name
    assert kvstore.env("10.0.0.7")["SHOAL_KVSTORE_NAME"] == f"{kvstore.name}-0"
    memory = kvstore.spec["resources"]["requests"]["memory"]
    assert not config.host_bytes or config.host_bytes < int(memory[:-2]) * sizes[memory[-2:]]


@pytest.mark.parametrize(
    ("name", "grpc", "http"), [("plain", "kubernetes.io/h2c", "http"), ("guarded", "https", "https")]
)
def test_doors_say_whether_they_speak_tls(name: str, grpc: str, http: str) -> None:
    """Else whoever stands before them, an ingress, speaks plain text to them."""
    (gateway,) = [c for c in containers(name) if c.component == "gateway"]
    (service,) = [s for s in of_kind(name, "Service") if s["metadata"]["name"] == gateway.name]
    told = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
    assert told == {"grpc": grpc, "http": http}
