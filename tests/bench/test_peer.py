"""A peer in a process of its own: asked, stopped between turns, and heard when it dies."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.peers.contestants import Peer
from bench.peers.conversation import Failed, Load
from bench.peers.environments import ENVIRONMENTS


@dataclass(frozen=True)
class _Here:
    """This process's own environment."""

    python: str = sys.executable
    module: str = "tests.bench.chatty_peer"
    failure: str | None = None


def with_peer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: Callable[[Peer], Awaitable[None]],
    dtype: str = "bfloat16",
) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "chatty", _Here())

    async def run() -> None:
        peer = Peer("chatty", Load("m", dtype, 1), "passive", tmp_path, {})
        try:
            await what(peer)
        finally:
            await peer.stop()

    asyncio.run(run())


def _stat(peer: Peer) -> str:
    """R: runs, S: sleeps, T: is stopped."""
    return Path(f"/proc/{peer.root_pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_it_answers_whatever_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def what(peer: Peer) -> None:
        loaded = await peer.start()
        assert (loaded.version, loaded.note) == ("9", "from a test")
        ran = await peer.run([[1, 2], [3]], 5)
        assert [t.tokens for t in ran.requests] == [5, 5]
        assert all(0 < t.first_s <= t.finished_s <= ran.seconds for t in ran.requests)

    with_peer(tmp_path, monkeypatch, what)
    assert "loading ..." in (tmp_path / "chatty.log").read_text()


def test_it_stands_still_when_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def what(peer: Peer) -> None:
        await peer.start()
        peer.pause()
        asking = asyncio.ensure_future(peer.run([[1]], 1))
        async with asyncio.timeout(10):
            while _stat(peer) != "T":  # noqa: ASYNC110 - a process has no such event
                await asyncio.sleep(0.01)
        assert not asking.done()
        await peer.resume()
        assert (await asking).requests[0].tokens == 1

    with_peer(tmp_path, monkeypatch, what)


def test_a_paused_one_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def what(peer: Peer) -> None:
        await peer.start()
        peer.pause()

    with_peer(tmp_path, monkeypatch, what)


def test_what_it_cannot_load_is_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def what(peer: Peer) -> None:
        with pytest.raises(Failed, match="ValueError: no float8 here"):
            await peer.start()

    with_peer(tmp_path, monkeypatch, what, dtype="float8")


def test_its_death_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def what(peer: Peer) -> None:
        await peer.start()
        with pytest.raises(Failed, match="illegal instruction at 0x0; SIGILL"):
            await peer.run([[1]], 666)

    with_peer(tmp_path, monkeypatch, what)
