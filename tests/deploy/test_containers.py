"""Container files: what they copy is there, what they install is pinned, what they start is a service."""

import re
import subprocess
import sys
import tomllib

import pytest

from chassis.service import ChassisConfig, _configure
from shard_worker.native import build
from tests.deploy.closure import closure, constraints, normal, requirements_of
from tests.deploy.container_file import Image, images, instructions, last, sources
from tests.deploy.rendering import COMPOSE, DEPLOY, PYTHON, ROOT, VALUES, compose, containers
from tests.deploy.settings import CONFIGS, MODULES, unknown_settings

FILES = {path.stem: path for path in sorted((DEPLOY / "containers").glob("*.Containerfile"))}
EXTRAS = {"gateway": ("gateway",), "batcher": (), "kvstore": (), "shard_worker": ("worker",), "autoscale": ()}
each = pytest.mark.parametrize("service", FILES)


def finals(service: str) -> dict[str, Image]:
    """What can be built of a file, by target."""
    made = images(FILES[service])
    if service == "shard_worker":
        return {"cpu": made["cpu"], "cuda": made["cuda"]}
    return {"": last(FILES[service])}


def test_there_is_one_for_each_service() -> None:
    assert set(FILES) == set(CONFIGS)


@each
def test_what_is_copied_is_there_and_travels(service: str) -> None:
    allowed = (ROOT / ".dockerignore").read_text().split()
    made = images(FILES[service])
    for image in made.values():
        for copy in image.copies:
            if copy.stage:
                assert copy.stage in made
                continue
            assert (ROOT / copy.source).exists(), copy.source
            assert f"!{copy.source}" in allowed, f"{copy.source} is left out of the context"
            assert ".." not in copy.source and copy.source not in (".", "./")


@each
def test_the_code_is_the_services_and_the_chassis(service: str) -> None:
    made = images(FILES[service])
    for image in finals(service).values():
        code = {(c.source, c.target) for c in sources(image, made) if c.target.startswith("/opt/shoal/code")}
        own = MODULES[service].partition(".")[0]
        assert code == {(name, f"/opt/shoal/code/{name}") for name in ("chassis", own)}
        assert image.env["PYTHONPATH"] == "/opt/shoal/code"


@each
def test_base_and_packages_are_pinned(service: str) -> None:
    text = FILES[service].read_text()
    assert re.search(
        r"^# python:3\.11\.\d+-slim-\w+, of all architectures\nARG PYTHON_IMAGE=", text, re.MULTILINE
    )
    for image in images(FILES[service]).values():
        assert re.fullmatch(r"python@sha256:[0-9a-f]{64}", image.base), image.base
        for run in image.runs:
            for install in re.findall(r"pip [^&;]*install[^&;]*", run):
                assert "-c constraints.txt" in install
                named = [word for word in install.split(" install ")[1].split() if re.match(r"[a-z]", word)]
                for word in set(named) - {"constraints.txt", "constraints-cuda.txt", "requirements.txt"}:
                    assert normal(word) in constraints(), word
    for name in re.findall(r"PACKAGED_MODELS=(\S+)", text):
        assert normal(name) in constraints()


@each
def test_all_that_is_installed_has_an_exact_version(service: str) -> None:
    """The list that the file makes, and what those need in turn, as the metadata of packages has it."""
    made = subprocess.run(
        [sys.executable, str(DEPLOY / "containers" / "requirements.py"), *EXTRAS[service]],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    lines = made.stdout.decode().split("\n")[:-1]
    assert lines == requirements_of(EXTRAS[service])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["dependencies"]) <= set(lines)
    needed = closure(lines)
    assert {name for name in needed if name not in constraints()} == set()
    assert ("torch" in needed) == (service == "shard_worker")


def test_an_extra_that_is_none_is_an_error() -> None:
    made = subprocess.run(
        [sys.executable, str(DEPLOY / "containers" / "requirements.py"), "gatway"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert made.returncode and b"gatway" in made.stderr and not made.stdout


@each
def test_it_runs_as_nobody_in_particular(service: str) -> None:
    for image in finals(service).values():
        assert image.user == "10001:10001" and image.stop_signal == "SIGTERM"
        assert image.entrypoint == ["python", "-m", MODULES[service]]
        writable = [word for run in image.runs for word in run.split() if word.startswith("/var/")]
        assert set(writable) == {"/var/cache/shoal", "/var/lib/shoal"}
        assert image.env["XDG_CACHE_HOME"] == "/var/cache" and image.env["HOME"] == "/var/lib/shoal"


@each
def test_its_settings_exist_and_its_ports_are_exposed(service: str) -> None:
    for image in finals(service).values():
        assert unknown_settings(service, image.env) == []
        more = {"SHOAL_GATEWAY_INSECURE": "true"} if service == "gateway" else {}
        chassis, config = _configure(service, CONFIGS[service], [], {**image.env, **more})
        listening = {chassis.metrics_address}
        for key in ("grpc_address", "http_address", "rpc_address", "listen", "rpc_listen"):
            listening.add(getattr(config, key, ""))
        ports = {int(address.rpartition(":")[2] or 0) for address in listening} - {0}
        own = {7002} if service == "batcher" else set()  # which it is told by whoever runs it
        assert image.exposed == ports | own
        assert f":{chassis.metrics_address.rpartition(':')[2]}/live" in image.healthcheck[-1]


def test_a_gateway_in_a_container_must_be_told_who_may_come_in() -> None:
    from chassis.config import ConfigError

    (image,) = finals("gateway").values()
    with pytest.raises(ConfigError, match="insecure"):
        _configure("gateway", CONFIGS["gateway"], [], image.env)


def test_the_compiled_stage_is_built_in_the_image_for_every_level() -> None:
    made = images(FILES["shard_worker"])
    assert any("g++" in run for run in made["native"].runs)
    command = next(word for run in made["native"].runs for word in run.split("&&") if "prebuild" in word)
    folder = command.split()[-1]
    for image in finals("shard_worker").values():
        assert image.env["SHOAL_NATIVE_DIR"] == folder
        assert (folder, folder, "native") in [(c.source, c.target, c.stage) for c in image.copies]
        assert not any("apt-get" in run for run in image.runs), "no compiler where it runs"
    assert (build.SOURCES / "prebuild.py").exists()


def test_cuda_is_a_target_with_its_own_versions() -> None:
    made = images(FILES["shard_worker"])
    (install,) = [run for run in made["build-cuda"].runs if "requirements.py cuda rdma" in run]
    assert "-c constraints-cuda.txt" in install
    assert any(line.startswith("nixl") for line in requirements_of(("cuda", "rdma")))
    assert made["cuda"].env["SHOAL_SHARD_WORKER_DEVICE"] == "auto"
    assert "SHOAL_SHARD_WORKER_DEVICE" not in made["cpu"].env
    assert list(made)[-1] == "cpu", "what is built without a target"


def test_an_instruction_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="VOLUME"):
        instructions("FROM x\nVOLUME /data\n")


@pytest.mark.skipif(not PYTHON.exists(), reason="make .charts/.ready")
def test_charts_and_compose_name_these_images_and_ports() -> None:
    names = {f"shoal-{service}" for service in FILES} | {"shoal-shard_worker-cuda"}
    exposed = {service: image.exposed for service in FILES for image in finals(service).values()}
    for name in (*VALUES, "plain", "scaled"):
        for container in containers(name):
            image, _, tag = container.spec["image"].rpartition(":")
            assert image in names and tag
            assert image.startswith(f"shoal-{container.component}")
            assert set(container.ports.values()) == exposed[container.component]
    for path in COMPOSE.glob("*.yaml"):
        for service in compose(path.name)["services"].values():
            image = service.get("image", "shoal-")
            assert re.fullmatch(r"nats@sha256:[0-9a-f]{64}", image) or image in {*names, "shoal-"}


def test_chassis_has_the_settings_that_all_are_given() -> None:
    assert ChassisConfig().stream_replicas == 1
