"""What stages computed, shared out over the rows of a step by their tokens."""

from batcher import harvest
from batcher.block_hash import BlockHasher, Extras
from batcher.events import StepReturned
from batcher.harvest import Harvest
from batcher.sequence import Clock, Phase, Sequence
from batcher.stops import Stops
from chassis.ids import Epoch
from chassis.messages.pipeline import StageTiming
from chassis.messages.request import Limits
from shard_worker.fake_model import TOKEN_BYTES
from tests.batcher.ownership_rig import request


def sequence(name: str) -> Sequence:
    asked = request(name)
    watch = Stops(TOKEN_BYTES, ()).watch(Limits(max_tokens=64), 3, 512)
    hasher = BlockHasher(b"n", 4, Extras())
    return Sequence(asked, (), watch, hasher, Clock(0.0, 0.0, Phase.PREFILL), (0, 0))


def timing(stage: int, compute_ns: int) -> StageTiming:
    return StageTiming(stage, 0, 5, compute_ns, 1)


def test_a_token_costs_the_same_whoever_has_it() -> None:
    a, b = sequence("a"), sequence("b")
    rows = ((a, 0, 3, 4, True), (b, 0, 0, 7, False))
    each = harvest._token_ns(rows, (timing(0, 8_000), timing(1, 16_000)))
    assert each == (1_000, 2_000)
    a.charge(1, each)
    b.charge(7, each)
    a.charge(1, (500_000, 0))
    assert a.timings(1.0).stage_compute_us == (501, 2)
    assert b.timings(1.0).stage_compute_us == (7, 14)


def test_stages_that_come_later_are_added_behind() -> None:
    a = sequence("a")
    a.charge(1, (1_000,))
    a.charge(1, (1_000, 2_000, 3_000))
    a.charge(1, (1_000,))
    assert a.timings(1.0).stage_compute_us == (3, 2, 3)


def test_what_ran_before_a_new_start_is_kept() -> None:
    before, after = sequence("a"), sequence("a")
    before.charge(2, (4_000,))
    after.carry_on(before)
    assert after.timings(1.0).stage_compute_us == (8,)


def test_the_share_of_a_ghost_is_nobodys() -> None:
    """Its sequence has begun anew: the other row pays no more for it."""
    ghost, lives = sequence("g"), sequence("l")
    ghost.num_computed = 3
    ghost.fall_back(0)
    rows = ((ghost, 0, 0, 3, False), (lives, 0, 0, 1, False))
    event = StepReturned(1.0, Epoch(1), 1, (), timings=(timing(0, 4_000_000),))

    class Nothing:
        """A roster of which a step without samples wants nothing."""

        def begin_siblings(self, now: float) -> None:
            pass

    harvested = Harvest(Nothing(), Nothing(), Nothing(), 4, prefix_cache=False)  # type: ignore[arg-type]
    assert harvested.gather(rows, event) == 1
    assert ghost.timings(1.0).stage_compute_us == ()
    assert lives.timings(1.0).stage_compute_us == (1_000,)
