"""Formation: who serves which layers, epochs that only grow, all or none."""

import dataclasses

import pytest

from batcher.formation import (
    CloseLinks,
    EpochWritten,
    Formation,
    FormationConfig,
    FormStage,
    PipelineLost,
    StageFormed,
    State,
    Stood,
    WorkersSeen,
    WriteEpoch,
    split_layers,
)
from batcher.pool_memory import pool_generation
from batcher.rebalance import EVERY_S, SETTLE_S
from chassis.ids import BootId, Epoch
from chassis.messages.registry import WorkerEntry


def worker(boot: str, **changes: object) -> WorkerEntry:
    entry = WorkerEntry(
        boot=BootId(boot),
        model="m",
        model_digest="d",
        rpc_address="r" + boot,
        transport_address="t" + boot,
        last_epoch=Epoch(0),
        free=True,
        num_layers=30,
        head_cost_layers=4.5,
    )
    return dataclasses.replace(entry, **changes)  # type: ignore[arg-type]


def formation(stages: int = 2) -> Formation:
    return Formation(BootId("me"), FormationConfig(num_stages=stages))


def form(
    f: Formation, now: float, entries: list[WorkerEntry], revision: int = 1, epoch: int = 7, prior: int = 0
) -> Stood:
    effects = f.handle(WorkersSeen(now, tuple((w, revision) for w in entries))) or f.tick(now + 10)
    write = effects[-1]
    assert isinstance(write, WriteEpoch)
    effects = f.handle(EpochWritten(now, write.call, Epoch(epoch)))
    while isinstance(effects[-1], FormStage):
        step = effects[-1]
        boot = step.stages[step.index].worker.boot
        formed = StageFormed(now, step.call, f"{boot}.1", 100 - step.index, prior_epoch=Epoch(prior))
        effects = f.handle(formed)
    assert isinstance(effects[-1], Stood)
    return effects[-1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layers_are_split_whole_and_the_head_counts(stages: int) -> None:
    ranges = split_layers(30, 4.5, stages)
    assert [r[0] for r in ranges] == [0, *[r[1] for r in ranges[:-1]]]
    assert ranges[-1][1] == 30 and all(a < b for a, b in ranges)
    if stages == 2:
        assert ranges == [(0, 17), (17, 30)]


def test_stands_with_the_smallest_pool_and_a_generation_of_the_stamps() -> None:
    f = formation()
    stood = form(f, 0.0, [worker("a"), worker("b")])
    assert stood.num_blocks == 99 and stood.epoch == 7 and f.state is State.STANDING
    assert stood.generation == pool_generation(("a.1", "b.1"), ((0, 17), (17, 30)))
    assert stood.generation != pool_generation(("a.2", "b.1"), ((0, 17), (17, 30)))


def test_waits_until_enough_are_free() -> None:
    f = formation()
    assert f.handle(WorkersSeen(0.0, ((worker("a"), 1), (worker("b", free=False), 2)))) == []
    assert f.state is State.SEEKING


def test_epoch_is_asked_above_every_workers_last() -> None:
    f = formation()
    effects = f.handle(WorkersSeen(0.0, ((worker("a", last_epoch=Epoch(41)), 1), (worker("b"), 2))))
    assert effects == [WriteEpoch(1, Epoch(41))]


def test_a_lost_race_for_the_epoch_tries_again_later() -> None:
    f = formation()
    [write] = f.handle(WorkersSeen(0.0, ((worker("a"), 1), (worker("b"), 2))))
    assert isinstance(write, WriteEpoch)
    assert f.handle(EpochWritten(0.0, write.call, None)) == []
    at = f.next_timer()
    assert at is not None and at > 0
    [again] = f.tick(at)
    assert isinstance(again, WriteEpoch) and again.call != write.call


def test_it_goes_on_trying_however_often_it_failed() -> None:
    """For an hour without a bus."""
    f = formation()
    effects = f.handle(WorkersSeen(0.0, ((worker("a"), 1), (worker("b"), 2))))
    now = 0.0
    for _ in range(1200):
        (write,) = effects
        assert isinstance(write, WriteEpoch)
        f.handle(EpochWritten(now, write.call, None))
        at = f.next_timer()
        assert at is not None and 0 < at - now <= f._config.retry_max_s + f._config.jitter_s
        now = at
        effects = f.tick(now)


def test_a_refusal_lets_all_go_and_shuns_until_a_new_word() -> None:
    f = formation()
    seen = WorkersSeen(0.0, ((worker("a"), 1), (worker("b"), 2)))
    [write] = f.handle(seen)
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(0.0, write.call, Epoch(5)))
    assert isinstance(first, FormStage) and first.index == 0
    [second] = f.handle(StageFormed(0.0, first.call, "a.1", 10))
    assert isinstance(second, FormStage) and second.index == 1
    refused = f.handle(StageFormed(0.0, second.call, None, last_epoch=Epoch(90), cause="old_epoch"))
    assert refused == [CloseLinks(Epoch(5))]
    assert f.tick(f.next_timer() or 0) == []  # b is shunned, a alone is too few
    [write] = f.handle(WorkersSeen(9.0, ((worker("a"), 1), (worker("b"), 3))))
    assert isinstance(write, WriteEpoch) and write.above == 90


def test_survivors_keep_their_layers_and_a_spare_takes_the_dead_ones() -> None:
    f = formation()
    form(f, 0.0, [worker("a"), worker("b")])
    lost = f.handle(PipelineLost(1.0, Epoch(7), BootId("a"), "link"))
    assert lost == [CloseLinks(Epoch(7))]
    now = worker("b", free=False, loaded=range(17, 30))
    f.handle(WorkersSeen(1.0, ((worker("a", free=False), 1), (now, 2), (worker("s"), 3))))
    [write] = f.tick(f.next_timer() or 0)
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(2.0, write.call, Epoch(9)))
    assert isinstance(first, FormStage)
    assert [s.worker.boot for s in first.stages] == ["s", "b"]


def test_late_news_of_an_old_epoch_changes_nothing() -> None:
    f = formation()
    form(f, 0.0, [worker("a"), worker("b")])
    assert f.handle(PipelineLost(1.0, Epoch(3), BootId("a"), "ghost")) == []
    assert f.handle(StageFormed(1.0, 1, "x.1", 5)) == []
    assert f.state is State.STANDING


def test_others_workers_in_use_are_left_alone() -> None:
    f = formation()
    form(f, 0.0, [worker("a"), worker("b")])
    f.handle(PipelineLost(1.0, Epoch(7), BootId("a"), "link"))
    f.handle(WorkersSeen(1.0, ((worker("b", free=False), 2), (worker("c", free=False), 3))))
    assert f.tick(f.next_timer() or 0) == []


def test_a_silent_worker_is_given_up() -> None:
    f = formation()
    [write] = f.handle(WorkersSeen(0.0, ((worker("a"), 1), (worker("b"), 2))))
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(0.0, write.call, Epoch(5)))
    assert isinstance(first, FormStage)
    assert f.tick(f.next_timer() or 0) == [CloseLinks(Epoch(5))]
    assert f.state is State.SEEKING


def test_who_could_not_be_reached_is_left_alone_not_who_was_to_be_asked() -> None:
    """The first stage is asked while its neighbour is dead: blaming it would choose the dead one for ever."""
    f = formation()
    [write] = f.handle(WorkersSeen(0.0, ((worker("a"), 1), (worker("b"), 2), (worker("c"), 3))))
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(0.0, write.call, Epoch(5)))
    assert isinstance(first, FormStage) and [s.worker.boot for s in first.stages] == ["a", "b"]
    f.handle(StageFormed(0.0, first.call, None, cause="refused", blamed=BootId("b")))
    [write] = f.tick(f.next_timer() or 0)
    assert isinstance(write, WriteEpoch)
    [again] = f.handle(EpochWritten(1.0, write.call, Epoch(6)))
    assert isinstance(again, FormStage) and [s.worker.boot for s in again.stages] == ["a", "c"]


def test_an_entry_with_fewer_layers_than_stages_is_nobody() -> None:
    """Anybody may write into the registry."""
    f = formation(3)
    odd = worker("a", num_layers=0)
    assert f.handle(WorkersSeen(0.0, tuple((w, 1) for w in (odd, worker("b"), worker("c"))))) == []
    stood = form(f, 1.0, [odd, worker("b"), worker("c"), worker("d")])
    assert sorted(s.worker.boot for s in stood.stages) == ["b", "c", "d"]


@pytest.mark.parametrize(("prior", "intact"), [(7, True), (8, False), (0, False)])
def test_memory_is_intact_only_if_no_other_batcher_had_the_workers_since(prior: int, intact: bool) -> None:
    """Same workers, same memory, same generation: but an epoch of another batcher wrote its own blocks."""
    f = formation()
    workers = [worker("a"), worker("b")]
    first = form(f, 0.0, workers)
    assert not first.intact
    f.handle(PipelineLost(1.0, Epoch(7), None, "step deadline"))
    again = form(f, 1.0, workers, revision=2, epoch=9, prior=prior)
    assert again.generation == first.generation and again.intact is intact
    assert again.prior_epoch == prior


def test_workers_that_stood_in_different_epochs_have_no_prior_one() -> None:
    f = formation()
    [write] = f.handle(WorkersSeen(0.0, ((worker("a"), 1), (worker("b"), 2))))
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(0.0, write.call, Epoch(9)))
    assert isinstance(first, FormStage)
    formed = StageFormed(0.0, first.call, "a.1", 10, prior_epoch=Epoch(7), prior_attachment=4)
    [second] = f.handle(formed)
    assert isinstance(second, FormStage)
    [stood] = f.handle(StageFormed(0.0, second.call, "b.1", 10, prior_epoch=Epoch(8)))
    assert isinstance(stood, Stood) and (stood.prior_epoch, stood.prior_attachment) == (0, 0)


@pytest.mark.parametrize("said", [(3, 5), (5, 3), (0, 5)])
def test_a_memory_is_as_of_the_newest_attach_that_a_worker_heard_of(said: tuple[int, int]) -> None:
    """A stage that a step did not reach yet knows less."""
    f = formation()
    [write] = f.handle(WorkersSeen(0.0, ((worker("a"), 1), (worker("b"), 2))))
    assert isinstance(write, WriteEpoch)
    [asked] = f.handle(EpochWritten(0.0, write.call, Epoch(9)))
    for boot, attachment in zip("ab", said, strict=True):
        assert isinstance(asked, FormStage)
        formed = StageFormed(
            0.0, asked.call, f"{boot}.1", 10, prior_epoch=Epoch(7), prior_attachment=attachment
        )
        [asked] = f.handle(formed)
    assert isinstance(asked, Stood)
    assert (asked.prior_epoch, asked.prior_attachment) == (7, 5)


def test_a_neighbour_blamed_for_the_dead_is_taken_again_at_once() -> None:
    """The living stage closes its links too, sometimes first; a standby is after the same workers."""
    f = formation()
    form(f, 0.0, [worker("a"), worker("b")])
    f.handle(PipelineLost(1.0, Epoch(7), BootId("a"), "link"))  # but b is the one that died
    now = ((worker("a", free=False), 1), (worker("b", free=False), 2), (worker("s"), 3))
    f.handle(WorkersSeen(1.0, now))
    assert f.next_timer() == pytest.approx(1.05)
    [write] = f.tick(f.next_timer() or 0)
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(1.06, write.call, Epoch(9)))
    assert isinstance(first, FormStage) and "b" in [s.worker.boot for s in first.stages]
    f.handle(StageFormed(1.07, first.call, None, cause="refused", blamed=BootId("b")))
    assert f.next_timer() == pytest.approx(1.12)  # no waiting as after a rival's success
    [write] = f.tick(f.next_timer() or 0)
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(1.13, write.call, Epoch(10)))
    assert isinstance(first, FormStage)
    assert sorted(s.worker.boot for s in first.stages) == ["a", "s"]


def test_it_is_seen_when_others_have_the_workers() -> None:
    f = formation()
    form(f, 0.0, [worker("a"), worker("b")])
    assert not f.others_stand
    f.handle(PipelineLost(1.0, Epoch(7), BootId("b"), "link"))
    f.handle(WorkersSeen(1.0, ((worker("a", free=False), 1), (worker("b", free=False), 2))))
    assert not f.others_stand  # they are its own, as far as anybody knows
    [write] = f.tick(f.next_timer() or 0)
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(2.0, write.call, Epoch(9)))
    assert isinstance(first, FormStage)
    f.handle(StageFormed(2.0, first.call, None, cause="connection refused", blamed=BootId("b")))
    f.tick(f.next_timer() or 0)
    assert not f.others_stand  # one of two is dead
    taken = ((worker("a", free=False), 5), (worker("b", free=False), 2), (worker("s", free=False), 6))
    f.handle(WorkersSeen(2.1, taken))
    assert f.others_stand


def choice(f: Formation, now: float, entries: list[WorkerEntry]) -> list[str]:
    """All say something new; who is chosen then. The first stage does not reach the second."""
    effects = f.handle(WorkersSeen(now, tuple((w, round(now * 1000)) for w in entries))) or f.tick(now)
    [write] = effects
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(now, write.call, Epoch(write.above + 1)))
    assert isinstance(first, FormStage)
    f.handle(StageFormed(now, first.call, None, cause="next_away", next_away=True))
    return [s.worker.boot for s in first.stages]


def test_two_that_do_not_reach_each_other_get_a_spare_between_them() -> None:
    """Both hold their layers and say so after each attempt: the choice must not fall on them for ever."""
    f = formation()
    a, b = worker("a", loaded=range(17)), worker("b", loaded=range(17, 30))
    s = worker("s")
    assert choice(f, 0.0, [a, b, s]) == ["a", "b"]
    assert choice(f, 10.0, [a, b, s]) == ["s", "b"]
    assert choice(f, 20.0, [a, b, s]) == ["a", "s"]  # it was not a: b is the lonely one
    assert choice(f, 30.0, [a, b, s]) == ["a", "b"]  # nobody reaches anybody: it may have healed
    stood = form(f, 40.0, [a, b, s], revision=9, epoch=99)
    assert [s.worker.boot for s in stood.stages] == ["a", "b"]
    f.handle(PipelineLost(41.0, Epoch(99), None, "step deadline"))
    assert choice(f, 50.0, [a, b, s]) == ["a", "b"]  # they stood: nothing is held against them


def test_who_hangs_up_while_it_is_asked_may_say_why() -> None:
    """Its link's end and its answer come by different ways; without a word it is blamed."""
    f = formation()
    entries = tuple((w, 1) for w in (worker("a"), worker("b"), worker("s")))
    for answers in (True, False):
        [write] = f.handle(WorkersSeen(0.0, entries)) or f.tick(f.next_timer() or 0.0)
        assert isinstance(write, WriteEpoch)
        [first] = f.handle(EpochWritten(5.0, write.call, Epoch(write.above + 1)))
        assert isinstance(first, FormStage)
        asked = first.stages[0].worker.boot
        assert asked == ("a" if answers else "b")
        assert f.handle(PipelineLost(5.0, f.epoch, asked, "link")) == []
        if answers:
            assert f.handle(StageFormed(5.1, first.call, None, next_away=True)) == [CloseLinks(f.epoch)]
    assert f.next_timer() == pytest.approx(5.2)
    assert f.tick(5.2) == [CloseLinks(f.epoch)]
    [write] = f.tick(f.next_timer() or 0.0)
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(6.0, write.call, Epoch(write.above + 1)))
    assert isinstance(first, FormStage) and [s.worker.boot for s in first.stages] == ["a", "s"]


def test_without_a_spare_two_that_are_apart_try_again() -> None:
    f = formation()
    entries = [worker("a"), worker("b")]
    for k in range(4):
        assert choice(f, 10.0 * k, entries) == ["a", "b"]


def test_who_is_apart_is_remembered_within_bounds() -> None:
    f = formation(3)
    entries = [worker(f"w{k:02}") for k in range(40)]
    for k in range(12):
        choice(f, 10.0 * k, entries)
        assert len(f._apart) <= 8


def chosen(made: Formation, *workers: WorkerEntry) -> list[tuple[str, int, int]]:
    """Boots with their layers, in order."""
    made.handle(WorkersSeen(0.0, tuple((w, 1) for w in workers)))
    return [(s.worker.boot, s.first_layer, s.end_layer) for s in made._stages]


def test_layers_that_workers_wish_for_are_theirs() -> None:
    wishing = worker("b", wish=range(20), preferred_stage=1)
    assert chosen(formation(), worker("a"), wishing) == [("b", 0, 20), ("a", 20, 30)]
    both = worker("a", wish=range(20, 30)), worker("b", wish=range(20)), worker("c", loaded=range(20))
    assert chosen(formation(), *both) == [("b", 0, 20), ("a", 20, 30)]


def test_wishes_that_do_not_fit_together_are_not_followed() -> None:
    usual = [stage[1:] for stage in chosen(formation(), worker("a"), worker("b"))]
    odd = worker("a", wish=range(5, 10)), worker("b", wish=range(12, 40))
    assert [stage[1:] for stage in chosen(formation(), *odd)] == usual
    assert (
        chosen(formation(), *odd, worker("c"), worker("d"))[0][0] in "cd"
    )  # who wishes for others is the last choice


def seen(now: float, *entries: WorkerEntry) -> WorkersSeen:
    return WorkersSeen(now, tuple((w, 1) for w in entries))


def test_a_much_quicker_worker_is_worth_a_new_pipeline_once_it_lasts() -> None:
    f = formation()
    a, b = worker("a", layer_us=100.0), worker("b", layer_us=100.0)
    form(f, 0.0, [a, b])
    a, b = (dataclasses.replace(w, free=False, loaded=r) for w, r in ((a, range(17)), (b, range(17, 30))))
    quick = worker("q", layer_us=30.0)
    f.handle(seen(10.0, a, b, quick))
    due_at = f.next_timer()
    assert due_at is not None and 10.0 + SETTLE_S <= due_at <= 10.0 + SETTLE_S + 1.0
    assert not f.quicker(due_at - 0.1) and f.quicker(due_at)
    assert f.handle(PipelineLost(due_at, Epoch(7), None, "others are quicker")) == [CloseLinks(Epoch(7))]
    [write] = f.tick(f.next_timer() or 0)
    assert isinstance(write, WriteEpoch)
    [first] = f.handle(EpochWritten(due_at, write.call, Epoch(9)))
    assert isinstance(first, FormStage)
    layers = {s.worker.boot: s.end_layer - s.first_layer for s in first.stages}
    assert layers[BootId("q")] > 20 and len(layers) == 2


def test_who_says_again_what_it_said_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of spares write their entries every few seconds: comparing them takes milliseconds."""
    compared: list[int] = []

    def counted(stages: object, workers: list[WorkerEntry], fitness: object) -> float:
        compared.append(len(workers))
        return 0.5

    monkeypatch.setattr("batcher.formation.gain", counted)
    f = formation()
    entries = [worker("a", layer_us=100.0), worker("b", layer_us=100.0)]
    form(f, 0.0, entries)
    entries.append(worker("c", layer_us=20.0))
    for revision in range(2, 6):
        assert f.handle(WorkersSeen(revision, tuple((w, revision) for w in entries))) == []
    assert compared == [3] and f.next_timer() is not None
    f.stay(10.0)
    assert f.handle(WorkersSeen(11.0, tuple((w, 9) for w in entries))) == []
    assert f.next_timer() == pytest.approx(10.0 + EVERY_S, abs=2.0), "it is due again all the same"
    f.handle(WorkersSeen(12.0, tuple((w, 10) for w in [*entries, worker("d", layer_us=10.0)])))
    assert compared == [3, 4]


def test_one_that_goes_again_or_gains_little_changes_nothing() -> None:
    f = formation()
    a, b = worker("a", layer_us=100.0), worker("b", layer_us=100.0)
    form(f, 0.0, [a, b])
    f.handle(seen(10.0, a, b, worker("q", layer_us=30.0)))
    f.handle(seen(11.0, a, b))
    assert f.next_timer() is None
    f.handle(seen(12.0, a, b, worker("q", layer_us=90.0)))
    assert f.next_timer() is None
    f.handle(seen(13.0, a, b, worker("q", layer_us=30.0, free=False)))
    assert f.next_timer() is None, "another's"


def test_a_pipeline_that_stays_is_left_alone_for_a_while() -> None:
    f = formation()
    a, b, quick = (worker(boot, layer_us=us) for boot, us in (("a", 100.0), ("b", 100.0), ("q", 30.0)))
    form(f, 0.0, [a, b])
    f.handle(seen(10.0, a, b, quick))
    due_at = f.next_timer()
    assert due_at is not None
    f.stay(due_at)
    assert not f.quicker(due_at) and f.next_timer() is None
    f.handle(seen(due_at + 5, a, b, quick))
    assert f.next_timer() == due_at + EVERY_S


def test_a_worker_gets_no_more_layers_than_it_has_memory_for() -> None:
    f = formation()
    stood = form(f, 0.0, [worker("a", layers_max=9), worker("b")])
    assert [s.end_layer - s.first_layer for s in stood.stages if s.worker.boot == "a"] == [9]
    assert formation().handle(seen(0.0, worker("a", layers_max=9), worker("b", layers_max=9))) == []


def test_one_that_leaves_is_replaced_at_once_if_another_is_there() -> None:
    f = formation()
    a, b = worker("a", loaded=range(17)), worker("b", loaded=range(17, 30))
    form(f, 0.0, [a, b])
    f.handle(WorkersSeen(5.0, ((b, 1),), withdrawn=("a",)))
    assert f.next_timer() is None, "nobody to take its place: it serves as long as it can"
    assert f.someone_leaves
    f.handle(WorkersSeen(6.0, ((b, 1), (worker("s"), 1)), withdrawn=("a",)))
    assert f.quicker(6.0) and f.next_timer() == 6.0


def test_one_that_the_registry_lost_is_judged_by_its_link_alone() -> None:
    f = formation()
    form(f, 0.0, [worker("a"), worker("b")])
    f.handle(seen(5.0, worker("b"), worker("s")))
    assert f.next_timer() is None and not f.someone_leaves
