"""Where a waiting request runs, case by case: by queue and by what each pool holds of its prompt."""

from dataclasses import replace

from batcher.events import BlocksLocated, GiveAway, LocateBlocks, PlacementEffect, TellLoad
from batcher.placement import HEARD_TTL_S, LOCATE_LEN_MAX, MOVES_MAX, TELL_PERIOD_S, Busy, Placement
from chassis.ids import BlockHash, BootId, RequestId
from chassis.messages.load import PipelineLoad

ME, OTHER, THIRD = BootId("me"), BootId("other"), BootId("third")
IDLE = Busy(0, 0, 0, places=8, places_max=8, prompt_token_s=0.001, step_s=0.01)
LOAD = PipelineLoad(OTHER, "theirs", True, 0.0, 8, 0.1, 0.001, 0.01)
R = RequestId("r1")


class Rig:
    def __init__(self, *loads: PipelineLoad, busy: Busy = IDLE) -> None:
        self.placement = Placement(ME, block_size_tokens=16)
        self.now = 10.0
        self.busy = busy
        for load in loads:
            self.placement.heard(load, self.now)
        self.tick()

    def tick(self, after_s: float = 0.0) -> tuple[PlacementEffect, ...]:
        self.now += after_s
        done = self.placement.tick(self.now, True, "mine", self.busy)
        self.placement.check()
        return done

    def come(self, request_id: RequestId = R, prompt_len: int = 1000, output_len_max: int = 10) -> None:
        self.placement.came(request_id, prompt_len, output_len_max)

    def ask(self) -> tuple[LocateBlocks, ...]:
        asked = self.placement.asks(lambda _: (BlockHash(bytes(32)),))
        assert all(isinstance(effect, LocateBlocks) for effect in asked)
        return asked  # type: ignore[return-value]

    def find(self, **held: int) -> list[BootId]:
        """Blocks of the prompt's head by pool; returns who is offered the request."""
        moved: list[BootId] = []
        for call in self.ask():
            found = tuple((pool, (blocks,) * len(call.request_ids)) for pool, blocks in held.items())
            event = BlocksLocated(self.now, call.call, call.request_ids, found)
            moved += [e.boot for e in self.placement.located(event) if isinstance(e, GiveAway)]
            self.placement.check()
        return moved


def test_with_one_pipeline_nothing_is_asked() -> None:
    rig = Rig()
    rig.come()
    assert rig.ask() == () and rig.placement.alone


def test_it_goes_where_most_of_its_prompt_is_held() -> None:
    rig = Rig(LOAD, replace(LOAD, boot=THIRD, pool_generation="third"))
    rig.come()
    assert rig.find(mine=4, theirs=40, third=20) == [OTHER]


def test_what_is_held_here_stays() -> None:
    rig = Rig(LOAD)
    rig.come()
    assert rig.find(mine=40, theirs=4) == []


def test_a_queue_that_costs_more_than_the_blocks_save_is_avoided() -> None:
    saved_s = 40 * 16 * 0.001
    for wait_s, moves in ((saved_s / 2, True), (saved_s * 1.5, False)):
        rig = Rig(replace(LOAD, wait_s=wait_s))
        rig.come()
        assert rig.find(theirs=40) == [OTHER] * moves


def test_who_has_no_place_is_as_busy_as_its_places() -> None:
    for place_s, moves in ((0.1, True), (1.0, False)):
        rig = Rig(replace(LOAD, places=0, place_s=place_s))
        rig.come()
        assert rig.find(theirs=40) == [OTHER] * moves


def test_a_queue_here_is_left_for_an_idle_pipeline() -> None:
    rig = Rig(LOAD, busy=replace(IDLE, prompt_tokens=5000))
    rig.come()
    assert rig.find() == [OTHER]


def test_a_small_gain_moves_nothing() -> None:
    rig = Rig(LOAD, busy=replace(IDLE, prompt_tokens=20))
    rig.come()
    assert rig.find() == []


def test_what_was_given_counts_as_the_takers_until_it_tells_anew() -> None:
    rig = Rig(LOAD, busy=replace(IDLE, prompt_tokens=1500))
    moved = []
    for i in range(3):
        rig.come(RequestId(f"r{i}"))
        moved += rig.find()
    assert len(moved) == 2  # a second of prompt each: the third would wait there as long as here
    rig.placement.heard(LOAD, rig.now)
    rig.come(RequestId("more"))
    assert rig.find() == [OTHER]


def test_what_stayed_counts_for_those_behind_it() -> None:
    rig = Rig(LOAD)
    moved = []
    for i in range(10):
        rig.come(RequestId(f"r{i}"))
        moved += rig.find()
    assert len(moved) == 5


def test_who_refused_is_not_asked_before_it_tells_anew() -> None:
    rig = Rig(LOAD)
    rig.come()
    assert rig.find(theirs=40) == [OTHER]
    rig.placement.refused(R)
    rig.busy = replace(IDLE, prompt_tokens=1000)
    assert not [e for e in rig.tick(1.0) if isinstance(e, GiveAway)]
    rig.placement.heard(LOAD, rig.now)
    assert [e for e in rig.tick(1.0) if isinstance(e, GiveAway)] == [GiveAway(rig.now, R, OTHER)]


def test_one_that_is_offered_is_not_offered_again_and_what_is_gone_not_at_all() -> None:
    rig = Rig(LOAD)
    rig.come()
    assert rig.find(theirs=40) == [OTHER]
    assert not [e for e in rig.tick(1.0) if isinstance(e, GiveAway)]
    rig.placement.gone(R)
    rig.placement.refused(R)
    rig.placement.check()
    assert not [e for e in rig.tick(1.0) if isinstance(e, GiveAway)]


def test_who_comes_later_is_given_from_the_end_of_the_line() -> None:
    rig = Rig(busy=replace(IDLE, prompt_tokens=20_000, waiting=20, places=0))
    for i in range(20):
        rig.come(RequestId(f"r{i}"))
    rig.placement.heard(replace(LOAD, place_s=0.0), rig.now)
    assert not [e for e in rig.tick(1.0) if isinstance(e, GiveAway)]
    assert rig.find()  # asked only now
    assert RequestId("r19") in [r for o in rig.placement._others.values() for r in o.offered]
    assert sum(len(o.offered) for o in rig.placement._others.values()) <= MOVES_MAX


def test_a_call_asks_for_a_bounded_number() -> None:
    rig = Rig(LOAD)
    for i in range(LOCATE_LEN_MAX + 1):
        rig.come(RequestId(f"r{i}"))
    assert [len(call.request_ids) for call in rig.ask()] == [LOCATE_LEN_MAX, 1]


def test_who_falls_silent_or_stands_no_more_is_forgotten() -> None:
    rig = Rig(LOAD)
    rig.placement.heard(replace(LOAD, accepting=False), rig.now)
    assert rig.placement.alone
    rig.placement.heard(LOAD, rig.now)
    assert not rig.placement.alone
    rig.tick(HEARD_TTL_S + 0.1)
    assert rig.placement.alone
    rig.placement.heard(replace(LOAD, boot=ME), rig.now)
    assert rig.placement.alone


def test_the_load_is_told_when_it_changes_and_every_second_anyway() -> None:
    rig = Rig(LOAD)
    assert not rig.tick(0.1)
    rig.busy = replace(IDLE, prompt_tokens=100)
    (told,) = rig.tick(0.1)
    assert isinstance(told, TellLoad)
    assert (told.load.boot, told.load.pool_generation, told.load.wait_s) == (ME, "mine", 0.1)
    assert [type(e) for e in rig.tick(TELL_PERIOD_S)] == [TellLoad]


def test_a_queue_for_places_waits_by_the_length_of_outputs() -> None:
    rig = Rig()
    for _ in range(50):
        rig.placement.ended(100)
    rig.busy = replace(IDLE, places=0, waiting=16)
    (told,) = rig.tick(TELL_PERIOD_S)
    assert isinstance(told, TellLoad)
    residence_s = 100 * 0.01
    assert abs(told.load.wait_s - 16 * residence_s / 8) < 1e-9 and told.load.places == 0
