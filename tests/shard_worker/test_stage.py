"""Whom a worker serves: formation, refusals, step order, lost links, and the time until it is free."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.ids import BootId, Epoch, StepNumber
from chassis.messages.forming import Form, FormRefusal
from chassis.messages.pipeline import BATCHER_STAGE, Hello, LinkKind
from shard_worker import events as s
from shard_worker.stage import Phase, Stage, StageConfig

CONFIG = StageConfig(
    boot=BootId("w"), model_digest="m", num_layers=8, step_tokens_max=256, links_max=5, free_after_s=0.2
)
FORM = Form(Epoch(3), BootId("b"), "m", 1, 3, 2, 6, "mem://next", 16, 64, 256)


def control(epoch: int, boot: str = "b") -> Hello:
    return Hello(Epoch(epoch), BATCHER_STAGE, BootId(boot), LinkKind.CONTROL)


def ring(epoch: int) -> Hello:
    return Hello(Epoch(epoch), 0, BootId("w0"), LinkKind.RING)


class Worker:
    """A stage with its invariants checked after every event."""

    def __init__(self, config: StageConfig = CONFIG) -> None:
        self.stage = Stage(config)
        self.now = 0.0
        self.seen: list[s.Effect] = []

    def __call__(self, event: s.Event) -> list[s.Effect]:
        effects = self.stage.handle(event)
        self.stage.check()
        self.seen += effects
        return effects

    def up(self, link: int, hello: Hello) -> list[s.Effect]:
        return self(s.LinkUp(self.now, link, hello))

    def down(self, link: int) -> list[s.Effect]:
        return self(s.LinkDown(self.now, link))

    def ask(self, form: Form, call: int = 1) -> list[s.Effect]:
        return self(s.FormAsked(self.now, call, form))

    def step(self, number: int, link: int = 2, epoch: int = 3) -> list[s.Effect]:
        return self(s.StepArrived(self.now, link, Epoch(epoch), StepNumber(number)))

    def form(self, form: Form = FORM, call: int = 1, first_link: int = 1) -> "Worker":
        """All the way: links first_link (control), +1 (ring), +2 (next)."""
        self.up(first_link, control(form.epoch, form.batcher_boot))
        if form.stage > 0:
            self.up(first_link + 1, ring(form.epoch))
        self.ask(form, call)
        self(s.LoadDone(self.now, call, range(form.first_layer, form.end_layer), 99, True))
        self(s.Dialled(self.now, call, first_link + 2))
        assert self.stage.phase is Phase.STANDING
        return self


def kinds(effects: list[s.Effect]) -> list[str]:
    return [e.what if isinstance(e, s.Count) else type(e).__name__ for e in effects]


def refusal(effects: list[s.Effect]) -> FormRefusal | None:
    answers = [e for e in effects if isinstance(e, s.Answer)]
    assert len(answers) == 1
    return answers[0].formed.refusal


def test_forming_step_by_step() -> None:
    w = Worker()
    assert w.up(1, control(3)) == [] and w.up(2, ring(3)) == []
    assert w.stage.free
    assert w.ask(FORM) == [s.Load(1, FORM), s.Announce()]
    assert not w.stage.free and w.stage.last_epoch == 3
    assert w(s.LoadDone(0.0, 1, range(2, 6), 99, True)) == [s.Dial(1, FORM), s.Announce()]
    stood, answer = w(s.Dialled(0.0, 1, 7))
    assert stood == s.Stood(FORM, 99, 7)
    assert isinstance(answer, s.Answer)
    formed = answer.formed
    assert (formed.refusal, formed.last_epoch, formed.kv_stamp, formed.num_blocks) == (None, 3, "w.1", 99)
    assert w.stage.loaded == range(2, 6)


def test_the_ring_link_may_come_after_the_form() -> None:
    w = Worker()
    w.up(1, control(3))
    w.ask(FORM)
    w(s.LoadDone(0.0, 1, range(2, 6), 99, True))
    w(s.Dialled(0.0, 1, 7))
    assert kinds(w.step(1)) == ["stray_step"]
    assert w.up(2, ring(3)) == []
    assert w.step(1) == [s.Execute()]


def test_stage_zero_reads_its_control_link() -> None:
    w = Worker().form(replace(FORM, stage=0, first_layer=0))
    assert w.step(1, link=1) == [s.Execute()]
    assert "Broke" in kinds(w.up(9, ring(3)))


@pytest.mark.parametrize(
    "form, why",
    [
        (replace(FORM, epoch=Epoch(2)), FormRefusal.OLD_EPOCH),
        (replace(FORM, epoch=Epoch(3)), FormRefusal.OLD_EPOCH),
        (replace(FORM, epoch=Epoch(4), model_digest="other"), FormRefusal.WRONG_MODEL),
        (replace(FORM, epoch=Epoch(4), batcher_boot=BootId("c")), FormRefusal.IN_USE),
        (replace(FORM, epoch=Epoch(5)), FormRefusal.FAILED),  # no control link of epoch 5
        (replace(FORM, epoch=Epoch(4), end_layer=9), FormRefusal.FAILED),
        (replace(FORM, epoch=Epoch(4), step_tokens_max=257), FormRefusal.FAILED),
        (replace(FORM, epoch=Epoch(4), slots_max=65_537), FormRefusal.FAILED),
    ],
)
def test_refusals_leave_what_stands(form: Form, why: FormRefusal) -> None:
    w = Worker().form()
    w.up(8, control(4, form.batcher_boot))
    effects = w.ask(form, call=2)
    assert refusal(effects) is why and len(effects) == 1
    assert w.step(1) == [s.Execute()]


def test_a_control_link_of_another_batcher_does_not_count() -> None:
    w = Worker()
    w.up(1, control(3, "c"))
    assert refusal(w.ask(FORM)) is FormRefusal.FAILED


def test_the_same_batcher_forms_anew_over_its_old_links() -> None:
    """The news of its closed links may be slower than its Form."""
    w = Worker().form()
    w.up(8, control(4))
    effects = w.ask(replace(FORM, epoch=Epoch(4)), call=2)
    assert kinds(effects) == ["Broke", "CloseLink", "CloseLink", "CloseLink", "Load", "Announce"]
    assert w.down(1) == [] and w.down(2) == [] and w.down(3) == []
    assert w.stage.phase is Phase.FORMING


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_any_lost_link_ends_the_epoch(lost: int) -> None:
    w = Worker().form()
    w.now = 1.0
    effects = w.down(lost)
    assert kinds(effects) == ["Broke", "CloseLink", "CloseLink"]
    assert {e.link for e in effects if isinstance(e, s.CloseLink)} == {1, 2, 3} - {lost}
    assert kinds(w.step(1)) == ["stray_step"]
    assert not w.stage.free and w.stage.free_at == 1.2
    assert w(s.Tick(1.19)) == []
    assert w(s.Tick(1.2)) == [s.Announce()]
    assert w.stage.free and w.stage.loaded == range(2, 6)


def test_until_it_is_free_only_its_batcher_may_have_it() -> None:
    w = Worker().form()
    w.down(1)
    w.up(8, control(4, "c"))
    w.up(9, control(5))
    assert refusal(w.ask(replace(FORM, epoch=Epoch(4), batcher_boot=BootId("c")), 2)) is FormRefusal.IN_USE
    assert "Load" in kinds(w.ask(replace(FORM, epoch=Epoch(5)), 3))


def test_after_that_another_may() -> None:
    w = Worker().form()
    w.down(1)
    w.now = 0.2
    w(s.Tick(0.2))
    w.up(8, control(4, "c"))
    assert "Load" in kinds(w.ask(replace(FORM, epoch=Epoch(4), batcher_boot=BootId("c")), 2))


def test_formed_tells_which_epoch_had_the_memory_before() -> None:
    """The stamp stays, but another batcher's steps may have written its blocks."""
    w = Worker().form()
    w.down(1)
    w.now += 1
    w.form(replace(FORM, epoch=Epoch(8), batcher_boot=BootId("other")), call=2, first_link=4)
    priors = [e.formed.prior_epoch for e in w.seen if isinstance(e, s.Answer)]
    assert priors == [0, 3]


def test_kv_stamps_count_allocations() -> None:
    w = Worker().form()
    w.up(11, control(4))
    w.up(12, ring(4))
    w.ask(replace(FORM, epoch=Epoch(4)), 2)
    w(s.LoadDone(0.0, 2, range(2, 6), 99, False))
    answer = w(s.Dialled(0.0, 2, 13))[-1]
    assert isinstance(answer, s.Answer) and answer.formed.kv_stamp == "w.1"
    w.up(21, control(5))
    w.ask(replace(FORM, epoch=Epoch(5), end_layer=8), 3)
    w(s.LoadDone(0.0, 3, range(2, 8), 99, True))
    answer = w(s.Dialled(0.0, 3, 23))[-1]
    assert isinstance(answer, s.Answer) and answer.formed.kv_stamp == "w.2"


def test_an_allocation_nobody_waits_for_still_counts() -> None:
    w = Worker()
    w.up(1, control(3))
    w.ask(FORM)
    assert refusal(w.down(1)) is FormRefusal.FAILED
    w(s.LoadDone(0.0, 1, range(2, 6), 99, True))
    w.up(2, control(4))
    w.ask(replace(FORM, epoch=Epoch(4)), 2)
    w(s.LoadDone(0.0, 2, range(2, 6), 99, True))
    answer = w(s.Dialled(0.0, 2, 9))[-1]
    assert isinstance(answer, s.Answer) and answer.formed.kv_stamp == "w.2"


def test_failures_while_forming_are_answered() -> None:
    w = Worker()
    w.up(1, control(3))
    w.ask(FORM)
    effects = w(s.LoadDone(0.0, 1, range(2, 6), error="no room"))
    assert refusal(effects) is FormRefusal.FAILED and w.stage.loaded == range(0)
    w.up(2, control(4))
    w.ask(replace(FORM, epoch=Epoch(4)), 2)
    w(s.LoadDone(0.0, 2, range(2, 6), 99, True))
    effects = w(s.Dialled(0.0, 2, None))
    assert refusal(effects) is FormRefusal.NEXT_AWAY
    assert s.CloseLink(2) in effects


def test_a_late_dial_is_closed() -> None:
    w = Worker()
    w.up(1, control(3))
    w.ask(FORM)
    w(s.LoadDone(0.0, 1, range(2, 6), 99, True))
    w.down(1)
    assert w(s.Dialled(0.0, 1, 7)) == [s.CloseLink(7)]


def test_steps_in_order_only() -> None:
    w = Worker().form()
    assert w.step(1) == [s.Execute()]
    assert kinds(w.step(1)) == ["repeated_step"]
    assert w.step(2) == [s.Execute()]
    assert kinds(w.step(3, epoch=2)) == ["old_epoch"]
    assert kinds(w.step(3, link=1)) == ["stray_step"]
    assert w.step(3) == [s.Execute()]
    assert kinds(w.step(5))[0] == "Broke"


@pytest.mark.parametrize(
    "event",
    [
        s.StepArrived(0.0, 2, Epoch(4), StepNumber(1)),
        s.StepArrived(0.0, 2, Epoch(3), StepNumber(2)),
        s.BadFrame(0.0, 2, "garbage"),
        s.BadFrame(0.0, 1, "garbage"),
        s.StepFailed(0.0, Epoch(3), "out of memory"),
    ],
)
def test_offences_end_the_epoch(event: s.Event) -> None:
    assert kinds(Worker().form()(event))[0] == "Broke"


def test_offences_of_others_do_not() -> None:
    w = Worker().form()
    w.up(8, control(9, "c"))
    assert kinds(w(s.BadFrame(0.0, 8, "garbage"))) == ["bad_frame"]
    assert kinds(w(s.StepFailed(0.0, Epoch(2), "late"))) == ["late_failure"]
    assert w.step(1) == [s.Execute()]


def test_ghost_links_are_closed() -> None:
    w = Worker().form()
    assert kinds(w.up(8, control(2))) == ["CloseLink", "ghost_link"]
    assert kinds(w.up(8, control(3, "c"))) == ["CloseLink", "second_link"]
    assert kinds(w.up(8, ring(3))) == ["CloseLink", "second_link"]
    assert kinds(w.up(8, replace(ring(9), kind=LinkKind.RESULT))) == ["CloseLink", "ghost_link"]


def test_parked_links_are_bounded() -> None:
    w = Worker().form()
    for link in range(10, 20):
        w.up(link, control(100 + link, "c"))
    assert w.step(1) == [s.Execute()]
    assert [e.link for e in w.seen if isinstance(e, s.CloseLink)] == list(range(10, 17))


def test_draining_serves_on_and_takes_nothing() -> None:
    w = Worker().form()
    assert w(s.Drain(0.0)) == [s.Announce()]
    assert w.step(1) == [s.Execute()]
    w.down(1)
    w(s.Tick(1.0))
    w.up(9, control(4))
    assert not w.stage.free
    assert refusal(w.ask(replace(FORM, epoch=Epoch(4)), 2)) is FormRefusal.IN_USE


# ---- any order of events ---------------------------------------------------------------------------

hellos = st.builds(
    Hello,
    st.integers(1, 5).map(Epoch),
    st.just(0),
    st.sampled_from(["b", "c"]).map(BootId),
    st.sampled_from(list(LinkKind)),
)
forms = st.builds(
    lambda epoch, boot, stage: replace(FORM, epoch=Epoch(epoch), batcher_boot=BootId(boot), stage=stage),
    st.integers(1, 5),
    st.sampled_from(["b", "c"]),
    st.integers(0, 2),
)
acts = st.one_of(
    st.tuples(st.just("up"), hellos),
    st.tuples(st.just("ask"), forms),
    st.tuples(st.just("down"), st.integers(0, 5)),
    st.tuples(st.just("loaded"), st.booleans()),
    st.tuples(st.just("dialled"), st.booleans()),
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("tick"), st.sampled_from([0.05, 0.3])),
)


@given(st.lists(acts, max_size=60), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_any_order_of_events(script: list[tuple[str, object]], eager: bool) -> None:
    """Every Form is answered once, every link is kept or closed once, steps never skip or repeat."""
    w = Worker()
    ids = iter(range(1, 10_000))
    open_links: list[int] = []
    asked: list[int] = []
    loads: list[s.Load] = []
    dials: list[s.Dial] = []
    number = 0

    def absorb(effects: list[s.Effect]) -> None:
        nonlocal number
        for effect in effects:
            match effect:
                case s.CloseLink():
                    open_links.remove(effect.link)
                case s.Load():
                    loads.append(effect)
                case s.Dial():
                    dials.append(effect)
                case s.Answer():
                    asked.remove(effect.call)
                case s.Stood():
                    assert effect.next_link in open_links
                    number = 0
                case s.Execute():
                    number += 1
                case _:
                    pass

    perform: dict[str, Callable[[object], list[s.Effect]]] = {
        "loaded": lambda ok: w(_loaded(w.now, loads.pop(0), bool(ok))) if loads else [],
        "tick": lambda wait: w(s.Tick(w.now)),
    }
    for name, value in script:
        if name == "tick":
            assert isinstance(value, float)
            w.now += value
        match name:
            case "up":
                link = next(ids)
                open_links.append(link)
                assert isinstance(value, Hello)
                absorb(w.up(link, value))
            case "ask":
                call = next(ids)
                asked.append(call)
                assert isinstance(value, Form)
                absorb(w.ask(value, call))
            case "down":
                if open_links:
                    assert isinstance(value, int)
                    link = open_links.pop(value % len(open_links))
                    absorb(w.down(link))
            case "dialled":
                if dials:
                    link = next(ids)
                    if value:
                        open_links.append(link)
                    absorb(w(s.Dialled(w.now, dials.pop(0).call, link if value else None)))
            case "step":
                effects = w.step(number + 1, _input_of(w), w.stage.last_epoch)
                absorb(effects)
            case _:
                absorb(perform[name](value))
        if eager:
            while loads:
                absorb(w(_loaded(w.now, loads.pop(0), True)))
    for load in loads:
        absorb(w(_loaded(w.now, load, False)))
    for dial in dials:
        absorb(w(s.Dialled(w.now, dial.call, None)))
    assert asked == [] and number >= 0


def _loaded(now: float, load: s.Load, ok: bool) -> s.LoadDone:
    layers = range(load.form.first_layer, load.form.end_layer)
    return s.LoadDone(now, load.call, layers, 9, ok, None if ok else "no")


def _input_of(w: Worker) -> int:
    return w.stage._input or 0
