"""What containers and units start, started: with their words, environments and files, but without an engine.

Every process must come to say that it is ready, answer a request together with the others, tell the metrics
that deploy/ speaks of, and end by itself when it is asked to.
"""

import asyncio
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shard_worker.fake_model import oracle
from shoal.client import AsyncClient, Tls
from shoal.nats_server import NatsServer
from tests.deploy import test_compose, test_systemd
from tests.deploy.connections import calls
from tests.deploy.container_file import last
from tests.deploy.guarded import Guarded, followed, mounted
from tests.deploy.house import House, Start, get
from tests.deploy.rendering import CHART, DEPLOY, PYTHON, containers, of_kind
from tests.deploy.test_network import CALLS
from tests.e2e.rig import PATIENCE_S, Answer, ask, call, until

LAYERS = 8
BETWEEN_HOSTS = {"SHOAL_CHASSIS_LINKS": '{ kinds = ["tcp"] }'}
FAKE = {  # no weights, and a batcher that takes the model that there is; links as pods have them
    "shard_worker": {
        "SHOAL_SHARD_WORKER_EXECUTOR": "fake",
        "SHOAL_SHARD_WORKER_FAKE_LAYERS": str(LAYERS),
        **BETWEEN_HOSTS,
    },
    "batcher": {"SHOAL_BATCHER_MODEL": "", **BETWEEN_HOSTS},
    "kvstore": BETWEEN_HOSTS,
    "autoscale": {"SHOAL_AUTOSCALE_MODEL": ""},
}
LIMIT_S = 40.0
charted = pytest.mark.skipif(not PYTHON.exists(), reason="make .charts/.ready")


def image_words(service: str) -> tuple[list[str], dict[str, str]]:
    image = last(DEPLOY / "containers" / f"{service}.Containerfile")
    return image.entrypoint, image.env


def of_chart(name: str = "laptop", guarded: Guarded | None = None) -> tuple[list[Start], dict[str, str]]:
    (map_,) = of_kind(name, "ConfigMap")
    secrets = guarded.secrets if guarded is not None else {}
    starts, done = [], set()
    for container in containers(name):
        if (where := (container.component, container.labels.get("shoal/stage"))) in done:
            continue
        done.add(where)
        service = container.component
        entrypoint, env = image_words(service)
        (volume,) = [v for v in container.pod["volumes"] if v["name"] == "config"]
        (item,) = volume["configMap"]["items"]
        files = {container.spec["args"][-1]: map_["data"][item["key"]], **mounted(container, secrets)}
        more = FAKE.get(service, {})
        words = [*entrypoint, *container.spec["args"]]
        starts.append(
            Start(container.name, service, words, {**env, **container.env("127.0.0.1"), **more}, files)
        )
    return starts, {"0.0.0.0": "", "127.0.0.1": ""}


def of_compose() -> tuple[list[Start], dict[str, str]]:
    starts = []
    for name in test_compose.OURS:
        service = test_compose.module_of(name)
        entrypoint, _ = image_words(service)
        env = {**test_compose.settings_of(name), **FAKE.get(service, {})}
        starts.append(Start(name, service, entrypoint, env))
    return starts, {"0.0.0.0": "", **{name: name for name in test_compose.OURS}}


def of_units() -> tuple[list[Start], dict[str, str]]:
    """The libraries are those of `all` there: what an image has is more than enough."""
    starts = []
    toml = (DEPLOY / "local.toml").read_text()
    for path in test_systemd.INSTANCES:
        service, env, words = test_systemd.settings_of(path)
        env |= FAKE.get(service, {})
        strict = test_systemd.denies_new_code(service)
        starts.append(Start(path.stem, service, words, env, {words[-1]: toml}, strict))
    return starts, {"127.0.0.1": ""}


@pytest.fixture
def folder() -> Iterator[Path]:
    """That another user can reach, as no folder of pytest's is."""
    with tempfile.TemporaryDirectory(prefix="shoal-house-") as made:
        yield Path(made)


async def serve(
    starts: list[Start],
    hosts: dict[str, str],
    folder: Path,
    told: set[str],
    guarded: Guarded | None = None,
) -> None:
    """`told`: the metrics' names that must be among those that the services tell."""
    secure = guarded.folder / "nats" if guarded is not None else None
    server = NatsServer(folder / "bus", secure=secure)
    house = House(folder, server.url.partition("?")[0], hosts)
    tls: Tls | bool = Tls.of_files(guarded.folder / "ca.pem") if guarded is not None else False
    key = guarded.key if guarded is not None else ""
    try:
        await asyncio.gather(server.start(), *(house.begin(start) for start in starts))
        metrics = {s.name: house.port(s.name, metrics_port(s)) for s in starts}
        await house.until_ready([s.name for s in starts], metrics, LIMIT_S)
        (gateway,) = [s for s in starts if s.service == "gateway"]
        where = f"127.0.0.1:{house.port(gateway.name, grpc_port(gateway))}"
        async with AsyncClient(where, api_key=key, tls=tls, retry=None) as client:
            await until(client.serving, "the gateway serves", LIMIT_S)
            answer = await ask(client, Answer(call([1, 2, 3], 20)))
            assert answer.ids == oracle((1, 2, 3), 0, 0.0, 20, LAYERS)
        made = calls({house.processes[s.name].pid: s.service for s in starts})
        allowed = {(who, whom) for who, whom, _ in CALLS}
        stages = sum(s.service == "shard_worker" for s in starts)
        ring = {("shard_worker", "shard_worker")} if stages > 1 else set()
        assert ring | {("batcher", "kvstore"), ("shard_worker", "batcher")} <= made <= allowed
        found: set[str] = set()
        for start in starts:
            status, body = await get(metrics[start.name], "/metrics")
            assert status == 200
            found |= set(re.findall(r"^# TYPE (\w+) ", body, re.MULTILINE))
        assert told <= found, told - found
        codes = await house.end()
        assert set(codes.values()) == {0}, {n: house.log(n)[-2000:] for n, c in codes.items() if c}
    finally:
        house.kill()
        await server.stop()


def metrics_port(start: Start) -> str:
    return start.env["SHOAL_CHASSIS_METRICS_ADDRESS"].rpartition(":")[2]


def grpc_port(start: Start) -> str:
    return start.env["SHOAL_GATEWAY_GRPC_ADDRESS"].rpartition(":")[2]


def named_metrics() -> set[str]:
    """In deploy/, of which each is one that services tell."""
    text = "\n".join(
        path.read_text() for path in DEPLOY.rglob("*") if path.suffix in (".md", ".yaml", ".tpl", ".txt")
    )
    return set(
        re.findall(r"\b(?:shoal|gen_ai)_[a-z_]+_(?:total|seconds|ratio|waiting|running|ready|wanted)\b", text)
    )


@pytest.mark.parametrize(
    "ways",
    [pytest.param(of_chart, marks=charted), pytest.param(of_compose, marks=charted), of_units],
    ids=["chart", "compose", "systemd"],
)
def test_what_is_started_serves(ways: Callable[[], tuple[list[Start], dict[str, str]]], folder: Path) -> None:
    starts, hosts = ways()
    assert {start.service for start in starts} == {"gateway", "batcher", "kvstore", "shard_worker"}
    with asyncio.Runner() as runner:
        runner.run(asyncio.wait_for(serve(starts, hosts, folder, set()), PATIENCE_S))


@charted
def test_what_the_page_has_guarded_serves_those_with_a_key(folder: Path, tmp_path: Path) -> None:
    """The chart with the Secrets that deploy/KUBERNETES.md makes, before a bus with users and TLS."""
    guarded = followed(tmp_path)
    starts, hosts = of_chart("guarded", guarded)
    with asyncio.Runner() as runner:
        runner.run(asyncio.wait_for(serve(starts, hosts, folder, named_metrics(), guarded), PATIENCE_S))


@charted
def test_the_server_finds_what_it_is_told_of_where_it_is_mounted(tmp_path: Path) -> None:
    guarded = followed(tmp_path)
    server = guarded.secrets["shoal-nats-server"]
    told = server["authorization.conf"].decode()
    paths = re.findall(r'_file: "([^"]*)"', told)
    assert paths and set(paths) == {f"/etc/nats-secure/{name}" for name in server} - {
        "/etc/nats-secure/authorization.conf"
    }
    local = (guarded.folder / "nats" / "authorization.conf").read_text()
    assert told.replace("/etc/nats-secure/", f"{guarded.folder}/nats/") == local
    rendered = (CHART / "values-rdma.yaml").read_text()
    assert "../nats-secure/authorization.conf" in rendered and "mountPath: /etc/nats-secure" in rendered
    for secret in ("shoal-keys", "shoal-gateway-tls", "shoal-rpc", "shoal-nats-gateway"):
        assert not any(name.startswith("ca.key") for name in guarded.secrets[secret])


def test_an_image_hides_what_its_file_does_not_install(folder: Path) -> None:
    """Else the tests above show nothing of images."""

    async def life() -> tuple[int | None, str]:
        house = House(folder, "nats://127.0.0.1:1", {})
        _, env = image_words("batcher")
        code = "import chassis.service, batcher.config, grpc; print('so far'); import tokenizers"
        await house.begin(Start("batcher", "batcher", ["python", "-c", code], env))
        try:
            ended = await house.processes["batcher"].wait()
        finally:
            house.kill()
        return ended, house.log("batcher")

    with asyncio.Runner() as runner:
        code, said = runner.run(asyncio.wait_for(life(), PATIENCE_S))
    assert code == 1 and "so far" in said and "No module named 'tokenizers'" in said
