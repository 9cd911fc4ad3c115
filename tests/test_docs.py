"""The documents say what is so: commands exist, snippets run, links lead on, numbers are the defaults."""

import asyncio
import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from bench.__main__ import ROWS
from chassis import nats_bus
from chassis.ids import RequestId
from chassis.messages import sampling
from chassis.service import ChassisConfig, _configure
from chassis.stream_layout import Discard
from chassis.subjects import LAYOUT
from gateway.admission import STOP_IDS_LEN_MAX, STOP_LEN_MAX
from gateway.sampling import CHOICES_MAX
from shoal import nats_server
from shoal.cli import _parser, main
from shoal.client import Params, ShoalError
from shoal.client.errors import error_of
from shoal.launcher import Deployment, Plan
from shoal.why import Story, collect

ROOT = Path(__file__).resolve().parent.parent
README, ARCHITECTURE, DECISIONS, CLIENT = (
    ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "DECISIONS", "CLIENT")
)
DEPLOY = ROOT / "deploy" / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]
SERVICES = ("gateway", "batcher", "kvstore", "shard_worker")
ADDRESS = "127.0.0.1:50051"
LIMIT_S = 60.0


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(path), re.MULTILINE | re.DOTALL)


def commands(path: Path = README) -> list[list[str]]:
    """The words of every shell command, without what is set before it."""
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line]


def split_settings(words: list[str]) -> tuple[dict[str, str], list[str]]:
    settings = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, settings[name] = words.pop(0).partition("=")
    return settings, words


def of_command(*start: str, path: Path = README) -> list[list[str]]:
    """What follows `start` in the commands that begin with it."""
    plain = [split_settings(list(words))[1] for words in commands(path)]
    return [words[len(start) :] for words in plain if words[: len(start)] == list(start)]


def config_of(section: str) -> type:
    found: type = (
        ChassisConfig if section == "chassis" else importlib.import_module(f"{section}.config").Config
    )
    return found


def rows_of(path: Path, head: str) -> list[list[str]]:
    """The cells of the table whose first line is `head`."""
    lines = text_of(path).splitlines()
    start = lines.index(head) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


# ---- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text_of(path)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        goal = path.parent / name if name else path
        assert goal.exists(), f"{path.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", text_of(goal), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads], (
                target
            )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    places = {p.name for p in ROOT.iterdir() if p.is_dir()} | {"*"}
    prose = re.sub(r"^```.*?^```", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
    named = [
        name for name in re.findall(r"`([\w.*-]+(?:/[\w.*-]*)+)`", prose) if name.split("/")[0] in places
    ]
    missing = [name for name in named if not any(ROOT.glob(name.rstrip("/")))]
    assert missing == []


def test_classes_whose_checks_are_named_have_them() -> None:
    source = "\n".join(text_of(path) for service in SERVICES for path in (ROOT / service).rglob("*.py"))
    for name in re.findall(r"`([A-Z]\w+)\.check`", text_of(ARCHITECTURE)):
        bodies = re.findall(rf"^class {name}\b.*?(?=^class |\Z)", source, re.MULTILINE | re.DOTALL)
        assert any("def check(" in body for body in bodies), name


def test_settings_that_are_named_exist() -> None:
    """SHOAL_<SECTION>_<KEY>, and flags in running text."""
    everything = "\n".join(map(text_of, DOCUMENTS))
    fields = {s: {f.name for f in dataclasses.fields(config_of(s))} for s in (*SERVICES, "chassis")}
    for name in re.findall(r"SHOAL_([A-Z_]+)", everything):
        if name in ("API_KEY", "CA"):  # of commands
            assert f'"SHOAL_{name}"' in text_of(ROOT / "shoal" / "gateway_words.py")
            continue
        if name == "NATS_URL":  # the one with a short name
            assert _configure("gateway", config_of("gateway"), [], {"SHOAL_NATS_URL": "n"})[0].nats_url == "n"
            continue
        keys = [(s, name.lower().removeprefix(f"{s}_")) for s in fields if name.startswith(f"{s.upper()}_")]
        assert any(key in fields[section] for section, key in keys), name
    flags = {f"--{key.replace('_', '-')}" for keys in fields.values() for key in keys}
    command = "".join(map(text_of, (ROOT / "shoal").glob("*.py")))
    flags |= set(re.findall(r"--[a-z-]+", _help_of("tests.sim") + command))
    assert set(re.findall(r"`(--[a-z-]+)[ `]", everything)) <= flags


def test_keys_for_several_machines_exist() -> None:
    for service, keys, _ in rows_of(DEPLOY, "| service | key | for example |"):
        for key in re.findall(r"\w+", keys):
            assert hasattr(config_of(service)(), key), f"{service}: {key}"


def test_limits_are_the_defaults() -> None:
    rows = rows_of(ARCHITECTURE, "| setting | default | beyond it |")
    assert len(rows) > 15
    for setting, default, _ in rows:
        section, _, key = setting.partition(".")
        assert getattr(config_of(section)(), key) == float(default), setting


def test_streams_are_those_of_the_layout() -> None:
    rows = rows_of(ARCHITECTURE, "| stream | messages | bytes | age in seconds | when full |")
    full = {Discard.NEW: "refuses", Discard.OLD: "forgets the oldest"}
    assert rows == [
        [s.name, str(s.msgs_max), str(s.bytes_max), f"{s.age_max_s:.0f}", full[s.discard]] for s in LAYOUT
    ]


def test_budgets_are_measured_and_targets() -> None:
    targets = tomllib.loads(text_of(ROOT / "bench" / "targets.toml"))
    rows = rows_of(ARCHITECTURE, "| hop | budget | measured as |")
    for _, budget, measured in rows:
        name = measured.partition("`")[0]
        last = re.findall(r"(\d+) us\)?$", measured) or re.findall(r"^(\d+)", budget)
        assert targets[name]["value"] == float(last[0]), name
    assert {"cores", "tax"} <= set(ROWS)


def test_decisions_are_numbered_dated_and_short() -> None:
    parts = re.split(r"^## ", text_of(DECISIONS), flags=re.MULTILINE)[1:]
    for number, part in enumerate(parts, 1):
        assert re.match(rf"{number}\. .+ \(\d{{4}}-\d\d-\d\d\)\n", part), part.splitlines()[0]
        assert len(part.rstrip().splitlines()) <= 11, part.splitlines()[0]
        assert "Cost: " in part


def test_the_readme_is_short_and_the_licence_is_the_one_stated() -> None:
    assert len(text_of(README).splitlines()) <= 150
    assert tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in text_of(ROOT / "LICENSE")


# ---- the README's commands -------------------------------------------------------------------------


@cache
def _help_of(module: str) -> str:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, check=True)
    return done.stdout.decode()


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    python = [["-m", service] for service in (*SERVICES, "tests.sim")]
    for words in commands():
        _, words = split_settings(words)
        match words:
            case ["make" | "grpcurl" | ".venv/bin/shoal", *_]:
                pass
            case ["curl", *_]:
                pass
            case [".venv/bin/nats-server", *rest]:
                subprocess.run([nats_server.binary(), "-t", *rest], cwd=ROOT, check=True)
            case [".venv/bin/python", *rest]:
                assert rest[:2] in python, words
            case _:
                raise AssertionError(f"who checks {words}?")


def test_make_has_these_doors() -> None:
    makefile = text_of(ROOT / "Makefile")
    asked = of_command("make")
    assert {words[0] for words in asked} >= {"demo", "test", "check", "sim", "bench", "targets"}
    for target, *settings in asked:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for setting in settings:
            assert (
                f"$({setting.partition('=')[0]})" in makefile or f"$${setting.partition('=')[0]}" in makefile
            )


def test_shoal_takes_these_words() -> None:
    asked = of_command(".venv/bin/shoal")
    assert {words[0] for words in asked} == {
        "up", "join", "generate", "chat", "models", "model", "why", "stats", "batch", "init", "keys", "scale",
        "serve",
    }  # fmt: skip
    for words in asked:
        arguments = _parser().parse_args(words)
        config = getattr(arguments, "config", None)
        assert config is None or (ROOT / config).exists()


def test_what_a_client_is_told_to_type_works(tmp_path: Path) -> None:
    for words in of_command(".venv/bin/shoal", path=CLIENT):
        _parser().parse_args(words)
    (flags,) = of_command("protoc", path=CLIENT)
    made = [flag.replace("=gen", f"={tmp_path}") for flag in flags]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *made], cwd=ROOT, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"gateway_pb2.py", "gateway_pb2_grpc.py"}
    (words,) = of_command("buf", path=CLIENT)
    assert all((ROOT / word).exists() for word in words if word.startswith("proto"))
    kinds = {split_settings(words)[1][0] for words in commands(CLIENT)}
    assert kinds == {".venv/bin/shoal", "protoc", "buf"}


def test_the_classes_of_failures_are_those_of_the_table() -> None:
    rows = rows_of(CLIENT, "| class | code | what it means |")
    named = {name for row in rows for name in re.findall(r"\w+", row[0])}
    assert named == {kind.__name__ for kind in ShoalError.__subclasses__()}
    for row in rows:
        for code in re.findall(r"[A-Z_]{6,}", row[1]):
            assert type(error_of(code, "")).__name__ in row[0]


@pytest.mark.parametrize("service", SERVICES)
def test_services_take_these_flags(service: str) -> None:
    asked = of_command(".venv/bin/python", "-m", service)
    assert asked
    for words in asked:
        assert words[0] == "--config"
        _configure(service, config_of(service), [words[0], str(ROOT / words[1]), *words[2:]], {})


def test_services_know_these_variables() -> None:
    settings = {k: v for words in commands() for k, v in split_settings(words)[0].items()}
    assert settings
    chassis, _ = _configure("gateway", config_of("gateway"), [], settings)
    assert [chassis.otlp_endpoint] == list(settings.values())


def test_the_simulation_takes_these_flags() -> None:
    known = _help_of("tests.sim")
    for words in of_command(".venv/bin/python", "-m", "tests.sim"):
        assert all(word in known for word in words if word.startswith("--"))
    assert re.findall(r"`python -m tests.sim (--\w+) N`", text_of(ARCHITECTURE))[0] in known


# ---- against a deployment --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as shared:
        yield shared


@pytest.fixture(scope="module")
def shoal(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The fake model: it knows chats, tokens and text, and no weights."""
    deployment = Deployment(Plan(model="fake", run_dir=tmp_path_factory.mktemp("docs")))
    runner.run(deployment.__aenter__())
    try:
        yield deployment
    finally:
        killed = runner.run(deployment.stop())
    assert not killed


@pytest.mark.parametrize(("path", "count"), [(README, 1), (CLIENT, 7)], ids=lambda value: str(value)[-9:])
def test_python_snippets_run(
    path: Path, count: int, shoal: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = blocks(path, "python")
    assert len(snippets) == count
    for snippet in snippets:
        assert ADDRESS in snippet
        code = snippet.replace(ADDRESS, shoal.address)
        code = code.replace("max_tokens=32)", "max_tokens=32, seed=7)")  # a drawn one may end at once
        exec(compile(code, path.name, "exec"), {"__name__": "snippet"})
        assert len(capsys.readouterr().out) > 20 or "sk-of-mine" in code


def test_generate_models_and_why_answer(
    runner: asyncio.Runner, shoal: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--run-dir", str(shoal.run_dir)]
    asked = of_command(".venv/bin/shoal", "generate")
    assert asked
    request_id = ""
    for words in asked:
        words = [
            "40" if before == "--max-tokens" else word
            for before, word in zip(["", *words], words, strict=False)
        ]
        assert main(["generate", *words, *where]) == 0
        said = capsys.readouterr()
        assert said.out.strip()
        request_id = re.findall(r"^request (\w+)$", said.err, re.MULTILINE)[0]
    assert main(["models", *where]) == 0
    assert "fake" in capsys.readouterr().out
    story = runner.run(_story(shoal, request_id))
    seen = {span.name for span in (*story.spans, *story.steps)}
    documented = set(re.findall(r"`((?:gateway|batcher|kvstore|shard_worker)\.\w+)`", text_of(ARCHITECTURE)))
    assert {"gateway.generate", "batcher.request", "shard_worker.step"} <= seen <= documented
    assert main(["why", request_id, *where]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("time to first token", "batcher.prefill", "steps"))


async def _story(shoal: Deployment, request_id: str) -> Story:
    async with asyncio.timeout(LIMIT_S):
        bus = await nats_bus.connect(shoal.nats_url, name="docs")
        try:
            story = await collect(bus, RequestId(request_id), wait_s=LIMIT_S)
            while not any(span.name == "shard_worker.step" for span in story.steps):  # workers tell it last
                await asyncio.sleep(0.1)
                story = await collect(bus, RequestId(request_id))
            return story
        finally:
            await bus.close()


def test_what_curl_is_given_is_answered(shoal: Deployment) -> None:
    asked = of_command("curl")
    assert {url.split("/")[3] for url, *_ in asked} == {"v1", "v2"}
    for url, *rest in asked:
        assert url.startswith("http://127.0.0.1:8000/")
        url = url.replace("127.0.0.1:8000", shoal.http_addresses[0]).replace("smollm2", "fake")
        headers = dict([rest[rest.index("-H") + 1].split(": ")] if "-H" in rest else [])
        body = rest[rest.index("-d") + 1].replace("smollm2", "fake")
        request = urllib.request.Request(url, body.encode(), headers)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            assert answer.status == 200 and json.loads(answer.read())


def test_reflection_clients_find_and_call(shoal: Deployment) -> None:
    """What grpcurl does with these words, without grpcurl: ask what there is, build the message, call."""
    asked = of_command("grpcurl", "-plaintext")
    assert ["127.0.0.1:50051", "list"] in asked
    with grpc.insecure_channel(shoal.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        for words in asked:
            body = json.loads(words[words.index("-d") + 1]) if "-d" in words else {}
            address, method = words[-2:]
            assert address == ADDRESS
            if method == "list":
                assert "shoal.v1.Inference" in database.get_services()
            else:
                assert _call(channel, pool, method, body)


def _call(channel: grpc.Channel, pool: DescriptorPool, path: str, body: dict[str, Any]) -> list[object]:
    service, _, name = path.rpartition("/")
    described: ServiceDescriptor = pool.FindServiceByName(service)
    method = described.methods_by_name[name]
    request = json_format.ParseDict(body, GetMessageClass(method.input_type)())
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(
        f"/{path}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    reply = call(request, timeout=LIMIT_S)
    return list(reply) if method.server_streaming else [reply]


def test_the_table_of_sampling_has_every_parameter() -> None:
    rows = rows_of(ARCHITECTURE, "| parameter | range | default | what it does |")
    named = [name for row in rows for name in re.findall(r"\w+", row[0])]
    elsewhere = {"model", "priority", "timeout_ms", "queue_timeout_ms", "resume_window_s", "client_key"}
    assert sorted(named) == sorted({f.name for f in dataclasses.fields(Params)} - elsewhere)
    numbers = {int(number) for row in rows for number in re.findall(r"\d+", row[1])}
    limits = (
        sampling.LOGIT_BIAS_LEN_MAX, sampling.ALLOWED_IDS_LEN_MAX, sampling.BAD_WORDS_LEN_MAX,
        sampling.BAD_WORD_BYTES_MAX, sampling.TOP_LOGPROBS_MAX, CHOICES_MAX, STOP_LEN_MAX, STOP_IDS_LEN_MAX,
    )  # fmt: skip
    assert set(limits) <= numbers
    assert str(sampling.RECORD_LOGPROBS_MAX) in text_of(ARCHITECTURE)
