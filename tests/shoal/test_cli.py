"""What the words of the command become; that they are understood at the other end is for tests/e2e."""

import argparse
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal import cli, gateway_words, generate_words, up_words
from shoal.client import (
    Delta,
    Event,
    Finished,
    Params,
    Prompt,
    ShoalError,
    Tls,
    TokenLogprobs,
    TopLogprob,
)
from shoal.configured import unheeded
from shoal.launcher import Plan
from shoal.plan import LaunchError

GENERATE: list[tuple[list[str], Prompt, Params]] = [
    (["hi"], "hi", Params()),
    (["--temperature", "0", "hi"], "hi", Params(temperature=0.0)),
    (["hi", "--top-p", "0.9"], "hi", Params(top_p=0.9)),
    (["hi", "--top-k", "0"], "hi", Params(top_k=0)),
    (["hi", "--seed", str(2**64 - 1)], "hi", Params(seed=2**64 - 1)),
    (["hi", "--max-tokens", "7"], "hi", Params(max_tokens=7)),
    (["hi", "--stop", "END", "--stop", "\n\n"], "hi", Params(stop=("END", "\n\n"))),
    (["hi", "--model", "m", "--priority", "0"], "hi", Params("m", priority=0)),
    (["hi", "--timeout", "1.5"], "hi", Params(timeout_ms=1500)),
    (["hi", "--min-p", ".1", "--typical-p", ".9"], "hi", Params(min_p=0.1, typical_p=0.9)),
    (["hi", "--repetition-penalty", "1.2"], "hi", Params(repetition_penalty=1.2)),
    (["hi", "--presence-penalty", "-1", "--frequency-penalty", "1"], "hi",
     Params(presence_penalty=-1.0, frequency_penalty=1.0)),
    (["hi", "--logit-bias", "5=-1.5", "--logit-bias", "7=2"], "hi", Params(logit_bias={5: -1.5, 7: 2.0})),
    (["hi", "--allowed-token-id", "3", "--bad-word", "no"], "hi",
     Params(allowed_token_ids=(3,), bad_words=("no",))),
    (["hi", "--min-tokens", "4", "--stop-token-id", "9", "--ignore-eos"], "hi",
     Params(min_tokens=4, stop_token_ids=(9,), ignore_eos=True)),
    (["hi", "--logprobs", "3", "-n", "2"], "hi", Params(top_logprobs=3, n=2)),
    (["hi", "--client-key", "k", "--resume-window", "9"], "hi", Params(client_key="k", resume_window_s=9)),
    (["hi", "--best-of", "4"], "hi", Params(best_of=4)),
    (["hi", "--prompt-logprobs", "0"], "hi", Params(prompt_logprobs=0)),
    (["--chat", "hi"], [("user", "hi")], Params()),
    (["--chat", "hi", "--system", "be brief"], [("system", "be brief"), ("user", "hi")], Params()),
]  # fmt: skip


@pytest.mark.parametrize(("words", "prompt", "params"), GENERATE, ids=lambda value: str(value)[:40])
def test_generate_sends_what_its_flags_say(
    words: list[str], prompt: Prompt, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Prompt, Params]] = []

    class Client:
        def __init__(self, arguments: argparse.Namespace) -> None:
            (self._address,) = gateway_words.addresses_of(arguments)

        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def generate(self, prompt: Prompt, params: Params) -> Iterator[Event]:
            asked.append((self._address, prompt, params))
            yield Finished("stop", 1, 0, 1, 0, 0, 0)

    monkeypatch.setattr(cli, "client_of", Client)
    assert cli.main(["generate", *words, "--address", "x:1"]) == 0
    assert asked == [("x:1", prompt, params)]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        assert cli.main(["batch", "submit", str(file), "--url", "http://127.0.0.1:1"]) == 1
        assert capsys.readouterr().err == f"shoal: {file}: {why}\n"


def test_a_file_without_requests_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text("\n")
    assert cli.main(["batch", "submit", str(file), "--url", "http://127.0.0.1:1"]) == 1
    assert f"{file}: has no line" in capsys.readouterr().err


def test_a_wrong_flag_is_told_where_the_right_ones_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["up", "--modle", "x"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --modle x; see `shoal up --help`" in capsys.readouterr().err


def test_who_has_no_key_is_told_where_it_is_taken_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: argparse.Namespace) -> None:
        raise ShoalError("UNAUTHENTICATED", "no API key")

    monkeypatch.setattr(cli, "client_of", refuse)
    assert cli.main(["models", "--address", "x:1"]) == 1
    assert "SHOAL_API_KEY" in capsys.readouterr().err


def plan_of(*words: str) -> Plan:
    return up_words.plan_of(cli._parser().parse_args(["up", *words]))


CONFIGURED = """
[gateway]
grpc_address = "127.0.0.1:4000"
http_address = "0.0.0.0:4001"
[batcher]
num_stages = 3
[shard_worker]
model = "tiny:2"
repository = "/models"
threads = 4
tensor_parallel = 2
model_name = "ours"
"""


def test_what_no_word_says_is_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "shoal.toml"
    config.write_text(CONFIGURED)
    told = Plan(
        "tiny:2",
        model_name="ours",
        repository=Path("/models"),
        stages=3,
        threads=4,
        tensor_parallel=2,
        port=4000,
        http_port=4001,
        config=config,
    )
    assert plan_of("--config", str(config)) == told
    words = ("--model", "fake", "--stages", "2", "--threads", "1", "--tensor-parallel", "1")
    ports = ("--port", "0", "--http-port", "0", "--repository", "/r")
    given = plan_of("--config", str(config), *words, *ports)
    assert given == Plan("fake", model_name="ours", repository=Path("/r"), stages=2, config=config)
    monkeypatch.setenv("SHOAL_BATCHER_NUM_STAGES", "5")
    monkeypatch.setenv("SHOAL_SHARD_WORKER_EXECUTOR", "fake")
    assert plan_of("--config", str(config)) == replace(told, stages=5, model="fake")
    assert plan_of().stages == 5 and plan_of("--stages", "1").stages == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[batcher]\nnum_stages = true", "[batcher] num_stages in {}: True is no whole number"),
        ("[shard_worker]\nthreads = 1.5", "[shard_worker] threads in {}: 1.5 is no whole number"),
        ("[shard_worker]\nmodel = 3", "[shard_worker] model in {}: 3 is no text"),
        ('[gateway]\ngrpc_address = "nowhere"', "[gateway] grpc_address in {}: 'nowhere' is no host:port"),
        ("[gateway", "{}: "),
    ],
)
def test_what_is_configured_wrong_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    config = tmp_path / "shoal.toml"
    config.write_text(text)
    with pytest.raises(LaunchError) as error:
        plan_of("--config", str(config))
    assert complaint.format(config) in str(error.value)


def test_what_is_configured_and_not_followed_is_said(tmp_path: Path) -> None:
    config = tmp_path / "shoal.toml"
    config.write_text(
        """
[chassis]
nats_url = "nats://me:secret@127.0.0.1:4222"
[gateway]
grpc_address = "127.0.0.1:4000"
http_address = ""
[kvstore]
rpc_address = "127.0.0.1:0"
[batcher]
listen = "tcp://127.0.0.1:7002"
[shard_worker]
listen = "tcp://0.0.0.0:0"
"""
    )
    lines = unheeded(Plan(config=config, http_port=8000), {})
    named = [line.split(" in ")[0] for line in lines]
    assert named == [
        f"not followed: {what}"
        for what in (
            "[chassis] nats_url",
            "[gateway] http_address",
            "[shard_worker] listen",
            "[batcher] listen",
        )
    ]
    assert "--nats" in lines[0] and "secret" not in lines[0] and "port 8000" in lines[1]
    assert unheeded(Plan(), {}) == []
    said = unheeded(Plan(), {"SHOAL_GATEWAY_GRPC_ADDRESS": "0.0.0.0:50051"})
    assert len(said) == 1 and "SHOAL_GATEWAY_GRPC_ADDRESS" in said[0] and "--listen" in said[0]


def test_up_runs_what_its_flags_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.touch()
    monkeypatch.delenv("SHOAL_NATS_URL", raising=False)
    assert plan_of() == Plan("smollm2", stages=2, port=50051, http_port=8000)
    words = ("--model", "a/b", "--stages", "3", "--spares", "1", "--config", str(config), "--run-dir", "r")
    assert plan_of(*words, "--nats", "nats://x:1", "--port", "0", "--http-port", "0") == Plan(
        "a/b", stages=3, spares=1, config=config, run_dir=Path("r"), nats_url="nats://x:1"
    )


@pytest.mark.parametrize("words", [("--pipelines", "-1"), ("--gateways", "0"), ("--kvstores", "65")])
def test_numbers_that_up_refuses(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", *words]) == 1
    assert capsys.readouterr().err.startswith(f"shoal: {words[0]}: {words[1]}; a number from")


def test_the_environment_names_a_broker_and_a_flag_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_NATS_URL", "nats://env:1")
    assert plan_of().nats_url == "nats://env:1"
    assert plan_of("--nats", "nats://flag:1").nats_url == "nats://flag:1"


@pytest.mark.parametrize("words", [["\udcff"], ["hi", "--seed", "-1"], ["-"]])
def test_what_cannot_be_sent_is_said_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"fine \xff"), encoding="utf-8"))
    assert cli.main(["generate", *words, "--address", "127.0.0.1:1"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("shoal: INVALID_ARGUMENT: ")


def test_choices_are_written_whole_and_log_probabilities_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    told = TokenLogprobs(-0.25, 1, b" a", (TopLogprob(5, -0.25, b" a"), TopLogprob(6, -2.0, b"\xc3")))
    generate_words.print_events(
        [
            Delta("x", (1,), 0, choice=0),
            Delta("y", (2,), 0, choice=1),
            Delta("z", (3,), 1, choice=0),
            Finished("stop", 1, 0, 1, 0, 0, 0, choice=1),
            Finished("stop", 1, 0, 2, 0, 0, 0, choice=0),
        ],
        several=True,
    )
    assert capsys.readouterr().out == "[1] y\n[0] xz\n"
    generate_words.print_events([Finished("stop", 1, 0, 2, 0, 0, 0, generated_tokens=9)])
    assert "9 by all candidates" in capsys.readouterr().err
    generate_words.print_events([Delta(" a", (5,), 0, (told,))])
    line = capsys.readouterr().out
    assert line.split() == ["-0.250", "1", "'", "a'", "'", "a'", "-0.250", "'\\\\xc3'", "-2.000"]


@pytest.mark.parametrize("bias", ["5", "x=1", "5=x"])
def test_a_bias_is_an_id_and_a_number(bias: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "hi", "--logit-bias", bias])
    assert "--logit-bias" in capsys.readouterr().err


def test_whom_a_command_asks_and_as_whom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def words(*more: str) -> argparse.Namespace:
        return cli._parser().parse_args(["models", "--run-dir", str(tmp_path), *more])

    assert gateway_words.addresses_of(words("--address", "a:1, b:2")) == ["a:1", "b:2"]
    state = {"pid": os.getpid(), "addresses": ["127.0.0.1:1", "127.0.0.1:2"], "nats_url": ""}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert gateway_words.addresses_of(words()) == state["addresses"]
    monkeypatch.setenv("SHOAL_API_KEY", "sk-x")
    assert gateway_words.client_of(words())._lines.metadata == (("authorization", "Bearer sk-x"),)
    assert gateway_words.tls_of(words()) is False and gateway_words.tls_of(words("--tls")) is True
    (tmp_path / "ca").write_bytes(b"pem")
    assert gateway_words.tls_of(words("--ca", str(tmp_path / "ca"))) == Tls(b"pem")
    monkeypatch.setenv("SHOAL_CA", str(tmp_path / "none"))
    with pytest.raises(ShoalError, match="none: No such file"):
        gateway_words.tls_of(words())


@pytest.mark.parametrize(
    ("held", "said"), [("1 x", "numbers with spaces"), (None, "No such file"), ("-5", "output_ids")]
)
def test_what_is_held_is_numbers_in_a_file(
    held: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "held"
    if held is not None:
        path.write_text(held)
    assert cli.main(["resume", "r", "--held", str(path), "--address", "127.0.0.1:1"]) == 1
    assert said in capsys.readouterr().err
