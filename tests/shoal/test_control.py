"""The socket of a running launcher: what is asked and refused; whole deployments are in tests/e2e."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal import scale_words
from shoal.cli import main
from shoal.control import CONNECTIONS_MAX, LINE_BYTES_MAX, SOCKET_FILE, Control, ask
from shoal.plan import LaunchError
from shoal.scaling import Scaled, Scaling


class Asked(Scaling):
    """Notes what is wanted; `gate` holds the answers back."""

    def __init__(self) -> None:
        self.wanted: list[Mapping[str, object]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.full = asyncio.Event()

    async def scale(self, words: Mapping[str, object]) -> Scaled:
        self.wanted.append(words)
        if len(self.wanted) == CONNECTIONS_MAX:
            self.full.set()
        await self.gate.wait()
        if words.get("gateways") == 0:
            raise LaunchError("gateways: 0; a number from 1 to 64")
        return Scaled(("gateway-1",), (), (), {"gateways": 2})


def test_what_is_asked_is_done_and_answered(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)  # longer than a socket's address may be
    folder.mkdir()

    async def go() -> None:
        asked = Asked()
        async with Control(asked).listening(folder):
            answer = await ask(folder, {"scale": {"gateways": 2}}, 5.0)
            assert answer == {"added": ["gateway-1"], "removed": [], "killed": [], "counts": {"gateways": 2}}
            with pytest.raises(LaunchError, match="gateways: 0; a number from 1 to 64"):
                await ask(folder, {"scale": {"gateways": 0}}, 5.0)
        assert asked.wanted == [{"gateways": 2}, {"gateways": 0}]
        assert not (folder / SOCKET_FILE).exists()
        with pytest.raises(LaunchError, match="does not answer"):
            await ask(folder, {"scale": {}}, 5.0)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"scale\n", "not a line of JSON"),
        (b"\xff\n", "not a line of JSON"),
        (b"\n", "not a line of JSON"),
        (b'{"scale": 1' + b"0" * LINE_BYTES_MAX + b"}\n", "not a line of JSON"),
        (b"[" * 20_000 + b"\n", "not a line of JSON"),
        (b"[]\n", 'not {"scale": {...}}'),
        (b'{"scale": 2}\n', 'not {"scale": {...}}'),
        (b'{"scale": {}, "more": 1}\n', 'not {"scale": {...}}'),
    ],
)
def test_what_is_no_question_is_refused_and_does_nothing(line: bytes, said: str, tmp_path: Path) -> None:
    async def go() -> None:
        asked = Asked()
        async with Control(asked).listening(tmp_path):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET_FILE))
            writer.write(line)
            writer.write_eof()
            assert json.loads(await reader.readline()) == {"error": said}
            writer.close()
        assert not asked.wanted

    asyncio.run(go())


def test_who_asks_while_too_many_do_is_told_and_the_end_lets_all_go(tmp_path: Path) -> None:
    async def go() -> None:
        asked = Asked()
        asked.gate.clear()
        async with asyncio.TaskGroup() as group:
            async with Control(asked).listening(tmp_path):
                waiting = [
                    group.create_task(_refused(tmp_path, "is being stopped")) for _ in range(CONNECTIONS_MAX)
                ]
                await asked.full.wait()
                await _refused(tmp_path, f"{CONNECTIONS_MAX} ask already")
                assert not any(task.done() for task in waiting)

    async def _refused(folder: Path, said: str) -> None:
        with pytest.raises(LaunchError, match=said):
            await ask(folder, {"scale": {}}, 30.0)

    asyncio.run(go())


def test_an_old_socket_of_a_launcher_that_died_is_replaced(tmp_path: Path) -> None:
    (tmp_path / SOCKET_FILE).write_bytes(b"")

    async def go() -> None:
        async with Control(Asked()).listening(tmp_path):
            await ask(tmp_path, {"scale": {}}, 5.0)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gateways"], "'gateways': say WHAT=NUMBER"),
        (["gateways=x"], "'gateways=x': say WHAT=NUMBER"),
        (["gateways=-1"], "'gateways=-1': say WHAT=NUMBER"),
        (["gateways=1", "gateways=2"], "gateways: said twice"),
        (["gateways=0"], "gateways: 0; a number from 1 to 64"),
        (["doors=1"], "doors: unknown; known are gateways"),
        ([f"spares={'9' * 5000}"], "spares: say at most 9 digits"),
        (["--timeout", "nan"], "--timeout nan: seconds"),
        (["--timeout", "0"], "--timeout 0: seconds"),
        (["gateways=2"], "nothing runs in"),
    ],
)
def test_words_that_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", *words, "--run-dir", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def test_what_is_said_of_a_change() -> None:
    counts = {"gateways": 1, "pipelines": 2, "spares": 0, "kvstores": 1}
    answer = {"added": ["worker-2", "batcher-1"], "removed": ["spare-0"], "killed": [], "counts": counts}
    assert scale_words.told(answer).splitlines() == [
        "started worker-2 batcher-1",
        "drained spare-0",
        "gateways=1 pipelines=2 spares=0 kvstores=1",
    ]
