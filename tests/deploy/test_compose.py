"""The compose file is one, and what it says of services is what they read."""

import re
from typing import Any

import pytest

from tests.deploy.rendering import COMPOSE, PYTHON, ROOT, compose, everything
from tests.deploy.settings import CONFIGS, config_of_toml, unknown_settings
from tests.deploy.test_containers import FILES, finals

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make .charts/.ready")

KNOWN = set(
    "image build command restart read_only cap_drop security_opt stop_grace_period networks depends_on "
    "healthcheck tmpfs mem_limit volumes environment ports deploy profiles".split()
)


def services(name: str = "compose.yaml") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose(name)["services"]
    return found


def module_of(service: str) -> str:
    return "shard_worker" if service.startswith("worker") else service


def settings_of(service: str) -> dict[str, str]:
    """The image's, and over them its own, with what is left to the caller as it is by default."""
    env = dict(next(iter(finals(module_of(service)).values())).env)
    for name, value in services()[service]["environment"].items():
        assert isinstance(value, str), f"{name}: a word that YAML would read as something else"
        env[name] = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
    return env


OURS = ("kvstore", "worker-0", "worker-1", "batcher", "gateway")
each = pytest.mark.parametrize("service", OURS)


def test_the_specification_takes_it() -> None:
    assert everything()["complaints_of_compose"] == {}
    for name in ("compose.yaml", "compose.cuda.yaml"):
        for service, said in services(name).items():
            assert set(said) <= KNOWN, service
    assert set(services()) == {"nats", *OURS}
    assert set(services("compose.cuda.yaml")) <= set(services())


@each
def test_services_take_their_settings(service: str) -> None:
    module = module_of(service)
    assert unknown_settings(module, settings_of(service)) == []
    chassis, config = config_of_toml(module, "", settings_of(service))
    assert chassis.nats_url == "nats://nats:4222"
    assert services()[service]["healthcheck"]["test"][-1].count(f":{chassis.metrics_address[-4:]}/ready") == 1
    reached = {"kvstore": "advertise_address", "batcher": "listen", "gateway": "advertise_address"}
    host = config.advertise_host if module == "shard_worker" else getattr(config, reached[service])
    assert re.sub(r"^tcp://|:\d+$", "", host) == service, "others find it by its name"
    assert float(services()[service]["stop_grace_period"][:-1]) > chassis.drain_timeout_s


def test_stages_are_those_of_the_batcher() -> None:
    _, batcher = config_of_toml("batcher", "", settings_of("batcher"))
    stages = [
        config_of_toml("shard_worker", "", settings_of(s))[1].preferred_stage
        for s in ("worker-0", "worker-1")
    ]
    assert stages == list(range(batcher.num_stages))


@each
def test_it_may_do_little(service: str) -> None:
    said = services()[service]
    assert said["read_only"] is True and said["cap_drop"] == ["ALL"]
    assert said["security_opt"] == ["no-new-privileges:true"]
    assert said["mem_limit"] and said["restart"] == "unless-stopped"


def test_only_the_gateway_is_reached_and_from_this_machine() -> None:
    for service, said in services().items():
        ports = said.get("ports", [])
        assert all(port.startswith("127.0.0.1:") for port in ports)
        assert bool(ports) == (service == "gateway")
        assert said["networks"] == (["inside", "outside"] if ports else ["inside"])
    assert compose("compose.yaml")["networks"]["inside"]["internal"] is True
    (image,) = finals("gateway").values()
    assert {int(port.rpartition(":")[2]) for port in services()["gateway"]["ports"]} < image.exposed


@each
def test_it_is_built_from_the_file_of_its_service(service: str) -> None:
    built = services()[service]["build"]
    assert (COMPOSE / built["context"]).resolve() == ROOT
    assert ROOT / built["dockerfile"] == FILES[module_of(service)]
    assert built.get("target", "") in finals(module_of(service))


def test_what_is_mounted_is_there() -> None:
    declared = set(compose("compose.yaml")["volumes"])
    for said in services().values():
        for volume in said.get("volumes", []):
            if volume["type"] == "bind":
                assert (COMPOSE / volume["source"]).is_file()
            else:
                assert volume["source"] in declared


def test_the_override_for_cuda_makes_one_stage() -> None:
    over = services("compose.cuda.yaml")
    assert over["worker-0"]["build"]["target"] in finals("shard_worker")
    env = {**settings_of("worker-0"), **over["worker-0"]["environment"]}
    assert config_of_toml("shard_worker", "", env)[1].device == "cuda"
    env = {**settings_of("batcher"), **over["batcher"]["environment"]}
    assert config_of_toml("batcher", "", env)[1].num_stages == 1
    assert over["worker-1"] == {"profiles": ["spare"]}, "which is not started"
    assert set(CONFIGS) >= {module_of(s) for s in over}
