"""`shoal join` over hosts with addresses of their own: killed, cut off, cut one way; answers are right."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.hosts.lab import Host, Lab
from tests.hosts.rig import CONFIG, HostsRig, until


@pytest.fixture(scope="module")
def rig(can_have_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsRig]:
    with Lab(3) as lab, HostsRig(lab, tmp_path_factory.mktemp("hosts")) as made:
        yield made


def kill_worker(rig: HostsRig) -> None:
    host = rig.lab.hosts[1]
    pid = rig.worker_pid(host)
    os.kill(pid, signal.SIGKILL)

    def another() -> bool:
        try:
            return rig.worker_pid(host) != pid
        except LookupError:
            return False

    until(another, lambda: "the worker starts again")


def cut_while(rig: HostsRig, cut: Callable[[Lab, Host, Host], None]) -> None:
    """Until the batcher has noticed."""
    before = lost(rig)
    cut(rig.lab, rig.lab.hosts[1], rig.lab.hosts[2])
    until(lambda: lost(rig) > before, lambda: "the batcher notices")
    rig.lab.heal()
    for host in rig.lab.hosts[1:]:
        rig.lab.plug(host)


def lost(rig: HostsRig) -> int:
    log = (rig.folder / "run1" / "logs" / "batcher.log").read_text()
    return log.count('"pipeline lost"')


FAULTS: dict[str, Callable[[HostsRig], None]] = {
    "killed": kill_worker,
    "cut off": partial(cut_while, cut=lambda lab, one, other: lab.cut(other)),
    "unplugged": partial(cut_while, cut=lambda lab, one, other: lab.unplug(one)),
    "one way between stages": partial(cut_while, cut=lambda lab, one, other: lab.cut_way(one, other)),
    "one way back": partial(cut_while, cut=lambda lab, one, other: lab.cut_way(other, lab.hosts[0])),
}
QUICK = ("killed", "one way between stages")


@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_answers_are_right_whatever_happens_to_a_host(rig: HostsRig, fault: str) -> None:
    clients = rig.asking(seed=len(fault))
    clients.wait_for("begun")
    FAULTS[fault](rig)
    assert clients.wait() == 0, clients.said
    assert clients.said.endswith("right\n")


def test_every_role_joins_and_leaves_amid_requests(rig: HostsRig, tmp_path: Path) -> None:
    """Another pipeline with its worker, a kvstore and a gateway on another host; then they leave again."""
    host = rig.lab.hosts[2]
    clients = rig.asking(seed=11, output_len=150)
    clients.wait_for("begun")
    one = ("--stages", "1", "--port", "50061", "--http-port", "0", "--insecure")
    roles = [word for role in ("kvstore", "batcher", "gateway") for word in ("--role", role)]
    more = rig.join(host, *roles, *one, "--run-dir", tmp_path / "more")
    more.wait_for("Ctrl-C drains")
    for role in ("kvstore", "worker-0", "gateway"):
        assert f"{role} has joined" in more.said
    stands = tmp_path / "more" / "logs" / "batcher.log"
    until(lambda: '"pipeline stands"' in stands.read_text(), stands.read_text)
    others = rig.asking(seed=12, output_len=150, address=f"{host.address}:50061")
    others.wait_for("begun")
    assert more.end() == 0, more.said
    for some in (clients, others):
        assert some.wait() == 0, some.said
        assert some.said.endswith("right\n")


def test_who_joins_with_another_model_is_told_and_ends(rig: HostsRig) -> None:
    """A stage with other layers would be in no pipeline with them."""
    host = rig.lab.hosts[2]
    other = rig.folder / "other.toml"
    other.write_text(CONFIG.replace("fake_layers = ", "fake_layers = 1"))
    words = ("--role", "worker", "--model", "fake", "--config", other, "--run-dir", rig.folder / "other")
    joining = rig.shoal(host, "join", rig.bus, *words)
    assert joining.wait() == 1
    assert "model fake differs from the one others serve" in joining.said


def test_who_reaches_no_bus_is_told_which(rig: HostsRig, tmp_path: Path) -> None:
    host = rig.lab.hosts[2]
    joining = rig.shoal(host, "join", "nats://192.0.2.1:4223", "--role", "worker", "--model", "fake")
    assert joining.wait() == 1
    assert "no NATS at nats://192.0.2.1:4223: " in joining.said
