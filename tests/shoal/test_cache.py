"""What `shoal cache` makes of what kvstores say."""

import argparse
import json
from pathlib import Path

import pytest

from chassis import subjects
from chassis.ids import BlockHash, BootId, Epoch
from chassis.memory_broker import MemoryBroker
from chassis.memory_bus import MemoryBus
from chassis.memory_rpc import MemoryRpcNetwork
from chassis.messages import cache as messages
from chassis.messages.cache import Held, Holdings, PoolTotals
from chassis.messages.kvstore import KEEP_DEFAULT, KEEP_PINNED, NO_PARENT, PoolRef
from chassis.messages.registry import KvstoreEntry, build_kvstore
from chassis.wire import kvstore_pb2 as pb
from shoal import cache_words, cli
from shoal.cache_words import CacheShown, PoolShown, as_json, look, render
from shoal.cached_prefixes import Run, runs_of, top
from tests.sim.loop import run as on_virtual_clock

BOOT = BootId("kv0")
TOTALS = PoolTotals(PoolRef("generation", Epoch(7), 1), "model", 16, 100, 60, 10, 30)


def content(label: str) -> BlockHash:
    return BlockHash(label.encode().ljust(32, b"."))


def held(
    path: str, hits: int = 0, references: int = 0, unused_ms: int | None = 0, keep: int = KEEP_DEFAULT
) -> Held:
    """A block named by its path: `ab` continues `a`."""
    parent = content(path[:-1]) if len(path) > 1 else NO_PARENT
    return Held(content(path), parent, references, hits, keep, unused_ms)


def name(run: Run) -> str:
    return run.last.decode().rstrip(".")


TREE = [
    held("a"), held("ab", hits=1), held("abc"), held("abcd", hits=2, unused_ms=50),
    held("abx", references=3, unused_ms=None), held("abxy", hits=4), held("q", hits=1, keep=KEEP_PINNED),
]  # fmt: skip


def test_runs_end_where_something_branches() -> None:
    runs = {name(r): r for r in runs_of(TREE)}
    assert {n: (r.blocks, r.depth_blocks) for n, r in runs.items()} == {
        "ab": (2, 2), "abcd": (2, 4), "abxy": (2, 4), "q": (1, 1),
    }  # fmt: skip
    assert {n: r.hits for n, r in runs.items()} == {"ab": 7, "abcd": 2, "abxy": 4, "q": 1}
    assert runs["abxy"].references == 3 and runs["abxy"].unused_ms is None
    assert runs["abcd"].unused_ms == 0 and runs["abcd"].parent is runs["ab"]


def test_a_beginning_that_is_not_known_is_said_so() -> None:
    untold = Held(content("zz"), None, 0, 0, KEEP_DEFAULT, 0)
    runs = {name(r): r for r in runs_of([held("mn"), untold, *TREE])}
    assert not runs["mn"].whole and not runs["zz"].whole and runs["abcd"].whole


def test_twins_are_one() -> None:
    (run,) = runs_of([held("a", references=1, unused_ms=None), held("a", references=2, unused_ms=9)])
    assert (run.blocks, run.references, run.unused_ms) == (1, 3, None)


@pytest.mark.parametrize(
    ("count", "by", "names"),
    [
        (10, "hits", ["ab", "abxy", "abcd", "q"]),
        (2, "hits", ["ab", "abxy"]),
        (1, "hits", ["ab"]),
        (2, "length", ["ab", "abxy"]),
        (0, "hits", []),
    ],
)
def test_the_first_come_with_what_they_continue(count: int, by: str, names: list[str]) -> None:
    assert [name(r) for r in top(runs_of(TREE), count, by)] == names


def test_long_chains_cost_no_recursion() -> None:
    chain = [BlockHash(number.to_bytes(32, "big")) for number in range(1, 20_001)]
    parents = [NO_PARENT, *chain]
    blocks = [Held(c, p, 0, 0, KEEP_DEFAULT, 0) for c, p in zip(chain, parents, strict=False)]
    (run,) = runs_of(reversed(blocks))
    assert run.depth_blocks == 20_000


def test_what_people_and_programs_read() -> None:
    shown = CacheShown(KvstoreEntry(BOOT, "x:1"), [PoolShown(TOTALS, "pool", TREE)])
    text = render(shown, 3, "hits")
    for words in ("kvstore kv0 at x:1", "epoch 7", "10 in use, 30 cached, 60 free", "and 1 more", "now"):
        assert words in text
    assert "pinned" not in text and "pinned" in render(shown, 9, "hits")
    (cache,) = json.loads(as_json([shown], 2, "length"))
    (pool,) = cache["pools"]
    assert (pool["total"], pool["tiers"], pool["prefixes_all"]) == (100, {"pool": 7}, 4)
    first, second = pool["prefixes"]
    assert second["continues"] == first["hash"] and second["tokens"] == 64
    assert "does not answer: gone" in render(CacheShown(KvstoreEntry(BOOT, "x:1"), error="gone"), 1, "hits")


def test_every_kvstore_is_read_piece_by_piece_and_a_dead_one_is_named() -> None:
    asked: list[tuple[str, int]] = []

    async def answer(request: pb.HoldingsRequest) -> pb.HoldingsReply:
        question = messages.parse_question(request)
        asked.append((question.generation, question.first_block))
        piece = TREE[question.first_block : question.first_block + 3] if question.generation else []
        following = question.first_block + 3
        more = following if question.generation and following < len(TREE) else None
        return messages.build_holdings(
            Holdings(BOOT, 1, (TOTALS,), question.generation, question.first_block, tuple(piece), more)
        )

    async def main() -> list[CacheShown]:
        broker, network = MemoryBroker(wall_ns=lambda: 0), MemoryRpcNetwork()
        bus, rpc = MemoryBus(broker, "test"), network.rpc("cache")
        await bus.ensure_streams()
        server = await network.rpc("kvstore").serve("kvstore:0", {messages.HOLDINGS: answer})
        entries = {"kv0": server.address, "kv1": "nobody:1"}
        for boot, address in entries.items():
            entry = build_kvstore(KvstoreEntry(BootId(boot), address))
            await bus.put_entry(subjects.kvstore_key(BootId(boot)), entry)
        found = await look(bus, rpc)
        await server.close()
        await bus.close()
        await network.close()
        return found

    living, dead = on_virtual_clock(main())
    assert asked == [("", 0), ("generation", 0), ("generation", 3), ("generation", 6)]
    assert living.pools[0].held == TREE and not living.error
    assert dead.error and not dead.pools


def test_the_command_knows_its_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[object] = []

    async def look(arguments: argparse.Namespace) -> tuple[str, bool]:
        assert arguments.tell is cache_words.tell
        asked.append((arguments.nats, arguments.top, arguments.by, arguments.json))
        return "text", len(asked) == 1

    monkeypatch.setattr(cli, "look", look)
    assert cli.main(["cache", "--nats", "n", "--top", "3", "--by", "length"]) == 0
    assert cli.main(["cache", "--nats", "n", "--json"]) == 1
    assert asked == [("n", 3, "length", False), ("n", 20, "hits", True)]
    assert "text" in capsys.readouterr().out
    monkeypatch.undo()
    assert cli.main(["cache", "--run-dir", str(tmp_path)]) == 1, "nothing runs there"


def test_tiers_are_shown_as_what_they_are() -> None:
    disk = PoolTotals(PoolRef("disk", Epoch(0), 0), "", 16, 3, 0, 0, 3, 3_600_000, 10_000_000)
    shown = CacheShown(KvstoreEntry(BOOT, "a"), [PoolShown(disk, disk.tier, TREE[:3])])
    text = render(shown, 5, "hits")
    assert "tier disk: 3 blocks of 16 tokens, 3.6 of 10.0 MB" in text and "in use" not in text
    assert "pool" not in text and "48" in text, "and its longest prefix"
    (pool,) = json.loads(as_json([shown], 5, "hits"))[0]["pools"]
    assert pool["tiers"] == {"disk": 3} and pool["num_bytes"] == 3_600_000
