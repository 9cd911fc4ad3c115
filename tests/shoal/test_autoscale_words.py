"""What `shoal up` is told of growing by itself, and what it refuses."""

import asyncio
from pathlib import Path

import pytest

from shoal import readiness
from shoal.autoscale.policy import Rules
from shoal.autoscale_words import rules_of
from shoal.cli import _parser, main
from shoal.plan import LaunchError


def rules(*words: str) -> Rules | None:
    return rules_of(_parser().parse_args(["up", *words]))


def test_the_words() -> None:
    assert rules() is None
    assert rules("--autoscale", "1:4") == Rules(pipelines_min=1, pipelines_max=4)
    told = rules("--autoscale", "0:2", "--ttft-objective-ms", "500", "--scale-down-after", "60")
    assert told == Rules(pipelines_min=0, pipelines_max=2, ttft_objective_ms=500, down_after_s=60.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--autoscale", "3:2"), "--autoscale: pipelines_max: 2; 3 to 64"),
        (("--autoscale", "0:65"), "--autoscale: pipelines_max: 65; 1 to 64"),
        (("--autoscale", "1:2", "--ttft-objective-ms", "0"), "ttft_objective_ms: 0"),
        (("--autoscale", "1:2", "--scale-down-after", "nan"), "down_after_s: nan"),
        (("--ttft-objective-ms", "500"), "--ttft-objective-ms: only with --autoscale"),
        (("--scale-down-after", "5"), "--scale-down-after: only with --autoscale"),
    ],
)
def test_what_cannot_be_is_said(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        rules(*words)


@pytest.mark.parametrize("word", ["2", "a:b", "1:", ":2", "-1:2", "1:2:3", "1.5:2", "\N{SUPERSCRIPT TWO}:3"])
def test_bounds_that_are_none_are_wrong_use(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["up", f"--autoscale={word}"])
    assert left.value.code == 2 and "MIN:MAX" in capsys.readouterr().err


def test_a_label_is_read_as_it_was_written(tmp_path: Path) -> None:
    body = 'x_total 1\nshoal_waiting{a="b",model="q\\"w\\\\e, r"} 0\n'

    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body.encode())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            assert await readiness.label_of(address, "shoal_waiting", "model") == 'q"w\\e, r'
            assert await readiness.label_of(address, "shoal_waiting", "b") is None
        assert await readiness.label_of(address, "shoal_waiting", "model") is None

    asyncio.run(main())
