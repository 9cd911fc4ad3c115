"""Stamps, in numpy and compiled: a step that goes as it should is never void, and no lie goes unseen."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from chassis.ids import Epoch
from chassis.messages import pipeline as p
from chassis.messages.sampling import Sampling
from chassis.sequence_digest import carried_on
from shard_worker.inputs import SlotTables, TableLimits
from shard_worker.native import library
from shard_worker.native.stamps import native_stamps
from shard_worker.stamps import Stamp, Stamps

BLOCK, BLOCKS, SLOTS = 4, 40, 5
LIMITS = TableLimits(
    slots_max=SLOTS,
    block_size_tokens=BLOCK,
    num_blocks=BLOCKS,
    context_len_max=64,
    step_tokens_max=64,
    vocab_size=99,
    whole=True,
)
START = p.SlotStart(Sampling(), 1)
ROOT = 0xFFFF_FFFF_FFFF_FF00  # digests wrap


@pytest.fixture(params=["numpy", "compiled"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "compiled" and library.native() is None:
        pytest.skip("there is no compiled code")
    return str(request.param)


def make(kind: str, rate: float = 1.0) -> Stamps:
    found = library.native()
    made = (Stamps if kind == "numpy" or found is None else native_stamps(found))(BLOCKS, BLOCK, rate)
    made.begin(Epoch(3), SLOTS)
    return made


@dataclass
class Row:
    """`ids` from `start` on; `open`: the last is left open; `sampled`: what it draws."""

    slot: int
    start: int
    ids: list[int]
    blocks: list[int]  # the whole table
    before: list[int] | None = None  # fresh: the ids before
    left_open: bool = False
    sampled: int | None = None
    digest: int | None = None  # instead of what `before` has


@dataclass
class Worker:
    """Tables, and the stamps that follow them."""

    stamps: Stamps
    tables: SlotTables = field(default_factory=lambda: SlotTables(LIMITS))
    number: int = 0
    lens: dict[int, int] = field(default_factory=dict)

    def step(self, *rows: Row, void_rows: tuple[int, ...] = (), says: bool = True) -> tuple[int, ...]:
        packed = self.packed(*rows, void_rows=void_rows, says=says)
        inputs = self.tables.take(packed)
        sampled = np.array([r.sampled for r in rows if r.sampled is not None], np.uint32)
        return self.stamps.note(packed, inputs.block_tables, sampled)

    def packed(self, *rows: Row, void_rows: tuple[int, ...] = (), says: bool = True) -> p.PackedStep:
        self.number += 1
        added = []
        for r in rows:
            known = 0 if r.before is not None else self.lens[r.slot]
            added.append(r.blocks[known:])
            self.lens[r.slot] = len(r.blocks)
        fresh = [r for r in rows if r.before is not None]
        digests = [carried_on(ROOT, r.before or []) if r.digest is None else r.digest for r in fresh]
        header = p.build_step(
            3,
            self.number,
            slots=[r.slot for r in rows],
            num_tokens=[len(r.ids) for r in rows],
            starts=[r.start for r in rows],
            flags=[2 * (r.before is not None) + (r.sampled is not None) for r in rows],
            output_index=[0] * len(rows),
            token_ids=[p.LAST_SAMPLED if r.left_open else i for r in rows for i in r.ids],
            table_lens=list(map(len, added)),
            table=[b for blocks in added for b in blocks],
            fresh=[START] * len(fresh),
            digests=digests if says else (),
        )
        return p.read_step(p.add_timing(header, p.StageTiming(0, 1, 1, 1, 1), void_rows))


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(99) for _ in range(count)]


def filled(kind: str) -> Worker:
    """Blocks 10, 11, 12 hold ids(12)."""
    worker = Worker(make(kind))
    assert worker.step(Row(0, 0, ids(12), [10, 11, 12], before=[])) == ()
    return worker


def test_a_cached_prefix_is_proven_and_carried_on(kind: str) -> None:
    worker = filled(kind)
    reused = Row(1, 8, [7, 8], [10, 11, 20], before=ids(8))
    assert worker.step(reused) == ()
    assert worker.step(Row(1, 10, [9, 5], [10, 11, 20])) == ()
    whole = [*ids(8), 7, 8, 9, 5]
    assert worker.step(Row(2, 12, [1], [10, 11, 20, 21], before=whole)) == ()
    assert worker.stamps.get(20) == Stamp(
        carried_on(ROOT, whole[:8]), carried_on(ROOT, whole), place=2, fill=4
    )


LIES = {
    "another block": Row(1, 8, [7], [10, 12, 20], before=ids(8)),
    "swapped": Row(1, 8, [7], [11, 10, 20], before=ids(8)),
    "one never written": Row(1, 8, [7], [10, 30, 20], before=ids(8)),
    "the same twice": Row(1, 8, [7], [10, 10, 20], before=ids(8)),
    "other ids": Row(1, 8, [7], [10, 11, 20], before=ids(8, seed=1)),
    "one id less": Row(1, 4, [7], [11, 20], before=ids(4)),
    "of another tenant": Row(1, 8, [7], [10, 11, 20], before=ids(8), digest=carried_on(ROOT + 1, ids(8))),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_seen(kind: str, lie: str) -> None:
    worker = filled(kind)
    honest = Row(2, 8, [7], [10, 11, 21], before=ids(8))
    assert worker.step(honest, LIES[lie]) == (1,)


@pytest.mark.parametrize("field", ["begin", "end", "epoch", "index", "fill"])
def test_a_flipped_bit_of_a_stamp_is_seen(kind: str, field: str) -> None:
    worker = filled(kind)
    worker.stamps.blocks[field][11] ^= 1 << (40 if field == "epoch" else 1)
    assert worker.step(Row(1, 12, [7], [10, 11, 12, 20], before=ids(12))) == (0,)


def test_a_running_row_whose_block_is_overwritten_is_void(kind: str) -> None:
    """In the same step: it may have read what another wrote."""
    worker = filled(kind)
    thief = Row(1, 0, [1, 2], [11], before=[])
    assert worker.step(thief, Row(0, 12, [3], [10, 11, 12, 13])) == (1,)


def test_who_goes_on_in_a_block_that_another_began_is_void(kind: str) -> None:
    """A sequence's first block, with as many tokens in it, or more: the ids before a row are its own."""
    for theirs in (2, 3):
        worker = Worker(make(kind))
        assert worker.step(Row(0, 0, [1, 2], [5], before=[])) == ()
        assert worker.step(Row(1, 0, [7, 8, 9][:theirs], [5], before=[])) == ()
        assert worker.step(Row(0, 2, [3], [5])) == (0,)


def test_of_two_who_write_one_block_neither_is_proven(kind: str) -> None:
    worker = Worker(make(kind))
    both = worker.step(Row(0, 0, [1, 2], [5], before=[]), Row(1, 0, [3, 4], [5], before=[]))
    assert both == (0, 1)


def test_of_a_block_that_a_step_wrote_twice_nothing_is_known(kind: str) -> None:
    """Who begins it has another's token amid its own, and what it computed of both is wrong, whatever the
    stamp says in the end."""
    begun, other = [Row(0, 0, ids(4), [10], before=[])], [Row(1, 0, [7], [5], before=[])]
    for first, second in (
        (Row(0, 4, ids(2), [10, 5]), Row(1, 1, [8], [5])),
        (Row(0, 4, ids(6), [10, 5, 11]), Row(1, 1, [8, 9, 10, 11], [5, 6])),
    ):
        for rows in (first, second), (second, first):
            worker = Worker(make(kind))
            assert worker.step(*begun, *other) == ()
            assert worker.step(*rows) == (0, 1)
            assert worker.stamps.get(5).fill == 0
            assert worker.step(Row(2, 0, ids(2), [5], before=[])) == (), "it can be written again"


def test_a_row_that_names_a_block_twice_is_void(kind: str) -> None:
    worker = Worker(make(kind))
    assert worker.step(Row(0, 0, ids(6), [10, 10], before=[])) == (0,)


def test_what_a_void_row_writes_is_never_proven(kind: str) -> None:
    worker = filled(kind)
    wrong = ids(8, seed=1)
    assert worker.step(Row(1, 8, ids(4), [10, 11, 20], before=wrong)) == (0,)
    assert worker.stamps.get(20).fill == 0
    assert worker.step(Row(1, 12, ids(4), [10, 11, 20, 21])) == (0,), "until its slot begins anew"
    assert worker.stamps.get(21).fill == 0
    assert worker.step(Row(1, 0, ids(4), [22], before=[])) == ()


def test_what_a_stage_before_has_seen_counts(kind: str) -> None:
    worker = filled(kind)
    rows = Row(1, 8, [7], [10, 11, 20], before=ids(8)), Row(2, 8, [7], [10, 11, 21], before=ids(8))
    assert worker.step(*rows, void_rows=(1,)) == (1,)
    assert worker.step(Row(2, 9, [7], [10, 11, 21]), Row(1, 9, [7], [10, 11, 20])) == (0,)


def test_who_says_nothing_is_not_judged_and_gives_nothing(kind: str) -> None:
    worker = Worker(make(kind))
    assert worker.step(Row(0, 0, ids(4), [10], before=[]), says=False) == ()
    assert worker.stamps.get(10).fill == 0
    assert worker.step(Row(1, 4, [1], [10, 11], before=ids(4)), says=False) == ()
    assert worker.step(Row(2, 4, [1], [10, 12], before=ids(4))) == (0,)


def test_an_id_left_open_is_the_one_that_was_sampled(kind: str) -> None:
    worker = Worker(make(kind))
    assert worker.step(Row(0, 0, [1, 2, 3], [10], before=[], sampled=44)) == ()
    assert worker.step(Row(0, 3, [0], [10], left_open=True, sampled=55)) == ()
    assert worker.step(Row(0, 4, [0], [10, 11], left_open=True, sampled=66)) == ()
    assert worker.step(Row(1, 4, [9], [10, 12], before=[1, 2, 3, 44])) == ()
    assert worker.step(Row(0, 5, [66, 7, 8], [10, 11])) == ()
    assert worker.step(Row(2, 8, [9], [10, 11, 13], before=[1, 2, 3, 44, 55, 66, 7, 8])) == ()
    assert worker.step(Row(3, 4, [9], [10, 14], before=[1, 2, 3, 45])) == (0,)


def test_a_step_that_did_not_end_leaves_nothing_known(kind: str) -> None:
    worker = filled(kind)
    packed = worker.packed(Row(1, 4, [1], [10, 12], before=ids(4)))
    worker.stamps.void(packed, worker.tables.take(packed).block_tables)
    assert worker.stamps.get(12).fill == 0 and worker.stamps.get(11).fill == 4
    assert worker.step(Row(2, 8, [1], [10, 11, 20], before=ids(8))) == ()


def test_a_new_epoch_keeps_what_blocks_hold(kind: str) -> None:
    worker = filled(kind)
    worker.stamps.begin(Epoch(4), SLOTS)
    again = Worker(worker.stamps)
    assert again.step(Row(0, 12, [7], [10, 11, 12, 13], before=ids(12))) == ()


def test_stamps_go_where_contents_go(kind: str) -> None:
    """Copied within the pool, amid a block too, which its owner has filled further; and elsewhere."""
    worker = Worker(make(kind))
    assert worker.step(Row(0, 0, ids(6), [10, 11], before=[])) == ()
    assert worker.step(Row(0, 6, [50], [10, 11])) == ()
    worker.stamps.copy(np.array([11], np.uint32), np.array([20], np.uint32))
    assert worker.step(Row(1, 6, [60, 61], [10, 20], before=ids(6))) == ()
    assert worker.step(Row(2, 8, [1], [10, 20, 21], before=[*ids(6), 60, 61])) == ()
    elsewhere = Worker(make(kind))
    for block, there in ((10, 3), (20, 7)):
        elsewhere.stamps.put(there, worker.stamps.get(block))
    assert elsewhere.step(Row(0, 8, [1], [3, 7, 8], before=[*ids(6), 60, 61])) == ()
    assert elsewhere.step(Row(1, 8, [1], [7, 3, 9], before=[*ids(6), 60, 61])) == (0,)


def test_whoever_goes_on_at_the_end_of_a_copy_must_have_its_ids(kind: str) -> None:
    worker = Worker(make(kind))
    assert worker.step(Row(0, 0, ids(6), [10, 11], before=[])) == ()
    other = [*ids(4), 71, 72]
    worker.stamps.copy(np.array([11, 11], np.uint32), np.array([20, 21], np.uint32))
    assert worker.step(Row(1, 6, [60], [10, 20], before=other)) == (0,)
    assert worker.step(Row(2, 6, [60], [10, 21], before=ids(6))) == ()


def test_what_a_step_writes_amid_a_load_is_not_told_to_be_the_load(kind: str) -> None:
    worker = filled(kind)
    stamp = worker.stamps.get(11)
    worker.stamps.forget(11)
    assert worker.step(Row(1, 8, [1], [10, 11, 20], before=ids(8))) == (0,)
    assert worker.stamps.restored(11, stamp)
    worker.stamps.forget(11)
    worker.step(Row(2, 4, [1], [10, 11], before=ids(4)))
    assert not worker.stamps.restored(11, stamp)
    assert worker.step(Row(3, 8, [1], [10, 11, 21], before=ids(8))) == (0,)


@pytest.mark.parametrize("rate, seen", [(0.0, 0), (0.25, 10), (0.5, 20), (1.0, 40)])
def test_some_rows_are_proven_for_all(kind: str, rate: float, seen: int) -> None:
    worker = Worker(make(kind, rate))
    lies = [worker.step(Row(1, 4, [7], [30, 20], before=ids(4))) for _ in range(40)]
    assert lies.count((0,)) == seen


def test_both_kinds_say_the_same_of_any_history() -> None:
    """Of sequences that come, reuse what others left, lose their place, and meet lies."""
    if library.native() is None:
        pytest.skip("there is no compiled code")
    for seed in range(60):
        rng = random.Random(seed)
        workers = Worker(make("numpy", 0.7)), Worker(make("compiled", 0.7))
        state: dict[int, tuple[list[int], list[int], int | None]] = {}  # ids computed, blocks, last sampled
        for _ in range(25):
            rows, taken = [], {b for _, blocks, _ in state.values() for b in blocks}
            for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
                computed, blocks, last = state.get(slot, ([], [], None))
                before = None
                if not blocks or len(computed) > 40 or rng.random() < 0.2:
                    cached = rng.choice(list(state.values()) or [([], [], None)])
                    reused = rng.randint(0, len(cached[0]) // BLOCK)
                    computed, blocks, last = cached[0][: reused * BLOCK], cached[1][:reused], None
                    before = list(computed)
                    if blocks and rng.random() < 0.2:
                        blocks = [*blocks[:-1], rng.randrange(BLOCKS)]
                left_open = last is not None and rng.random() < 0.5
                new = [last or 0] if left_open else ids(rng.randint(1, 6), rng.randrange(1 << 30))
                while len(blocks) * BLOCK < len(computed) + len(new):
                    block = rng.choice([b for b in range(BLOCKS) if b not in taken] or [0])
                    taken.add(block)
                    blocks = [*blocks, block]
                sampled = rng.randrange(99) if rng.random() < 0.7 else None
                if left_open and sampled is None:
                    sampled = 1
                row = Row(slot, len(computed), new, blocks, before, left_open, sampled)
                state[slot] = ([*computed, *new], blocks, sampled)
                rows.append(row)
            one, other = (worker.step(*rows) for worker in workers)
            assert one == other, seed
            assert np.array_equal(workers[0].stamps.blocks, workers[1].stamps.blocks), seed


def test_digests_can_be_carried_on_from_anywhere() -> None:
    some = ids(50)
    for at in (0, 1, 17, 50):
        assert carried_on(carried_on(5, some[:at]), some[at:], at) == carried_on(5, some)
    assert carried_on(5, np.array(some, np.uint32)) == carried_on(5, tuple(some)) == carried_on(5, some)
    assert carried_on(5, [*some[1::-1], *some[2:]]) != carried_on(5, some)
