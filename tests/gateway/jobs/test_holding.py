"""The core of jobs: what becomes of one that is held, row by row, and under any order of events."""

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chassis.bus import Stored
from chassis.errors import Code
from chassis.ids import AckToken, Attempt, BootId
from chassis.messages.jobs import EXPIRED, build_line
from chassis.messages.request import Reason, Terminal
from gateway.jobs.events import (
    Ack,
    Buried,
    Bury,
    Delivered,
    Effect,
    Ended,
    Event,
    Failed,
    LetGo,
    Look,
    Looked,
    Nak,
    Progress,
    Ran,
    Run,
    Stop,
    Tick,
    Write,
    WriteAnswer,
    Written,
)
from gateway.jobs.holding import Holding
from gateway.jobs.verdict import DELAY_MAX_S, REFUSALS_MAX, Missing, delay_s

SUBJECT = "shoal.job.t.q.k"
ANSWER = "shoal.ans.t.q.k"
LINE = build_line("c", "/v1/completions", {"model": "m", "prompt": "x"})
OK = Ran("r", 200, {"object": "text_completion"})
FAILED = Terminal(Attempt(1), BootId("b"), Reason.FAILED, (), error="three deaths")
REFUSED = Terminal(Attempt(1), BootId("b"), Reason.REFUSED, (), error="full")


class Core:
    """Hands events in, finds the one effect of a kind, checks the invariants after each."""

    def __init__(self, **settings: Any) -> None:
        self.core = Holding(8, settings.pop("best", 9), Missing(settings.pop("model_wait_s", 300.0)))
        self.now = 100.0
        self.effects: list[Effect] = []

    def put(self, event: Event) -> list[Effect]:
        self.effects = self.core.handle(event)
        self.core.check()
        return self.effects

    def deliver(
        self,
        seq: int = 1,
        token: str = "t1",
        data: bytes = LINE,
        count: int = 1,
        age_s: float = 0.0,
        **headers: str,
    ) -> list[Effect]:
        said = {key.replace("_", "-"): value for key, value in headers.items()}
        message = Stored(SUBJECT, data, seq, 0, said)
        return self.put(Delivered(self.now, message, AckToken(token), count, age_s))

    def one(self, kind: type[Any]) -> Any:
        (found,) = [effect for effect in self.effects if isinstance(effect, kind)]
        return found

    def run(self, outcome: Ran | Failed, **more: Any) -> list[Effect]:
        """Delivered, looked for, run."""
        self.deliver(**more)
        self.put(Looked(self.now, self.one(Look).call, False))
        return self.put(Ended(self.now, self.one(Run).call, outcome))

    def said(self) -> dict[str, Any]:
        written = self.one(WriteAnswer)
        assert written.subject == ANSWER
        line: dict[str, Any] = json.loads(written.data)
        return line


def test_it_is_acknowledged_only_once_its_answer_is_stored() -> None:
    core = Core()
    assert [type(e) for e in core.deliver()] == [Look]
    core.put(Looked(core.now, core.one(Look).call, False))
    run = core.one(Run)
    assert (run.priority, run.name.key, run.refusals) == (9, "k", 0)
    core.put(Ended(core.now, run.call, OK))
    assert (
        core.said()["response"]["body"] == {"object": "text_completion"} and core.said()["custom_id"] == "c"
    )
    assert not any(isinstance(e, Ack) for e in core.effects)
    core.put(Written(core.now, core.one(WriteAnswer).call, Write.STORED))
    assert core.effects == [Ack(AckToken("t1"))]
    assert len(core.core) == 0


def test_a_write_of_unknown_fate_is_repeated_until_it_is_known() -> None:
    core = Core()
    core.run(OK)
    core.put(Written(core.now, core.one(WriteAnswer).call, Write.UNKNOWN))
    assert core.effects == []
    core.put(Tick(core.now + 0.1))
    assert [type(e) for e in core.effects] == [Progress]
    core.put(Tick(core.now + 2.0))
    again = core.one(WriteAnswer)
    core.put(Written(core.now, again.call, Write.TAKEN))
    assert core.effects == [Ack(AckToken("t1"))]


def test_a_redelivery_of_what_is_held_only_brings_its_token() -> None:
    core = Core()
    core.deliver()
    look = core.one(Look)
    assert core.deliver(token="t2", count=2) == []
    core.put(Looked(core.now, look.call, True))
    assert core.effects == [Ack(AckToken("t2"))]


def test_another_message_under_its_subject_waits() -> None:
    core = Core()
    core.deliver()
    core.deliver(seq=2, token="other")
    assert core.one(Nak).token == "other"


def test_completions_that_are_not_awaited_are_ghosts() -> None:
    core = Core()
    core.deliver()
    call = core.one(Look).call
    core.put(LetGo(core.now))
    assert core.effects == [Nak(AckToken("t1"), 0.0)]
    assert core.put(Looked(core.now, call, False)) == []


def test_letting_go_stops_what_runs_and_lets_answers_be_written() -> None:
    core = Core()
    core.deliver()
    core.put(Looked(core.now, core.one(Look).call, False))
    run = core.one(Run)
    core.put(LetGo(core.now))
    assert core.effects == [Stop(run.call), Nak(AckToken("t1"), 0.0)]
    core.run(OK)
    write = core.one(WriteAnswer)
    assert core.put(LetGo(core.now)) == []
    core.put(Written(core.now, write.call, Write.STORED))
    assert core.effects == [Ack(AckToken("t1"))]


def test_what_may_pass_goes_back_and_waits_longer_each_time() -> None:
    for code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.ABORTED, Code.CANCELLED):
        core = Core()
        core.run(Failed("r", code, "not now", 100))
        first = core.one(Nak).delay_s
        core.run(Failed("r", code, "not now", 100), count=5)
        assert 0.5 < first < 2 and core.one(Nak).delay_s > 8
    assert all(delay_s(count, 63) <= DELAY_MAX_S * 1.25 for count in range(1, 5000))
    assert delay_s(1, 0, 60_000) == 45.0, "a hint is waited for"


def test_it_goes_back_for_no_longer_than_its_time() -> None:
    core = Core()
    core.run(Failed("r", Code.UNAVAILABLE, "not now"), count=9, age_s=4.0, Shoal_Timeout_Ms="5000")
    assert core.one(Nak).delay_s == 1.0
    core.deliver(age_s=5.0, Shoal_Timeout_Ms="5000")
    core.put(Looked(core.now, core.one(Look).call, False))
    assert core.said()["error"]["code"] == EXPIRED and core.said()["response"] is None


def test_a_death_is_buried_before_it_is_told() -> None:
    core = Core()
    core.run(Failed("r", Code.INTERNAL, "three deaths", terminal=FAILED))
    bury = core.one(Bury)
    core.put(Buried(core.now, bury.call, failed=True))
    assert core.effects == []
    core.put(Tick(core.now + 2.0))
    core.put(Buried(core.now, core.one(Bury).call))
    assert core.said()["response"]["status_code"] == 500


def test_what_a_queue_refused_is_made_another_request_until_it_is_enough() -> None:
    core = Core()
    core.run(Failed("r", Code.UNAVAILABLE, "full", terminal=REFUSED))
    for refusals in range(1, REFUSALS_MAX + 1):
        assert core.effects == []
        core.now += 60.0
        core.put(Tick(core.now))
        core.put(Looked(core.now, core.one(Look).call, found=False))
        run = core.one(Run)
        assert run.refusals == refusals
        core.put(Ended(core.now, run.call, Failed("r", Code.UNAVAILABLE, "full", terminal=REFUSED)))
    assert core.said()["response"]["status_code"] == 503


def test_what_was_answered_while_it_rested_is_not_made_another_request() -> None:
    core = Core()
    core.run(Failed("r", Code.UNAVAILABLE, "full", terminal=REFUSED))
    core.now += 60.0
    core.put(Tick(core.now))
    core.put(Looked(core.now, core.one(Look).call, found=True))
    assert core.one(Ack) and core.core.room == 8


def test_a_model_is_missed_for_its_time_without_a_break() -> None:
    core = Core(model_wait_s=100.0)
    missed = Failed("r", Code.NOT_FOUND, "model: 'm' is not served")
    for _ in range(5):
        core.run(missed)
        assert core.one(Nak)
        core.now += 20.0
    core.run(missed)
    assert core.said()["response"]["status_code"] == 404
    core.put(Written(core.now, core.one(WriteAnswer).call, Write.STORED))
    core.now += 1000.0  # for all that is known it was there meanwhile
    core.run(Ran("r", 404, {"error": {}}))
    assert core.one(Nak)
    core.run(OK)
    core.put(Written(core.now, core.one(WriteAnswer).call, Write.STORED))
    core.now += 50.0
    core.run(missed)
    assert core.one(Nak)


def test_an_answer_that_no_message_holds_is_an_error_instead() -> None:
    core = Core()
    core.run(OK)
    core.put(Written(core.now, core.one(WriteAnswer).call, Write.TOO_LARGE))
    assert core.said()["response"]["status_code"] == 500
    assert "larger" in core.said()["response"]["body"]["error"]["message"]


def test_room_is_what_is_not_held() -> None:
    core = Core()
    for i in range(8):
        message = Stored(f"{SUBJECT}{i}", LINE, i + 1, 0)
        core.put(Delivered(core.now, message, AckToken(str(i)), 1, 0.0))
    assert core.core.room == 0
    core.put(LetGo(core.now))
    assert core.core.room == 8


OUTCOMES = (
    OK,
    Ran("r", 404),
    Ran("r", 503),
    Ran("r", 200, {}, (), (Reason.CANCELLED,)),
    Failed("r", Code.UNAVAILABLE, "x"),
    Failed("r", Code.UNAVAILABLE, "x", terminal=REFUSED),
    Failed("r", Code.INTERNAL, "x", terminal=FAILED),
    Failed("r", Code.INTERNAL, "x"),
    Failed("r", Code.PERMISSION_DENIED, "x"),
    Failed("r", Code.DEADLINE_EXCEEDED, "x"),
)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 3)), max_size=60))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_in_any_order_each_delivery_is_settled_once_or_held(steps: Sequence[tuple[int, int, int]]) -> None:
    """Nothing is acknowledged without a stored answer, settled twice or forgotten."""
    core = Core()
    calls: dict[int, Effect] = {}
    latest: dict[str, str] = {}  # tokens, by subject
    settled: list[str] = []
    stored: set[str] = set()
    for serial, (kind, a, b) in enumerate(steps):
        core.now += 0.7
        effects: list[Effect] = []
        if kind <= 1:
            body = LINE if a else b"\xff"
            message = Stored(f"{SUBJECT}{b}", body, b + 1, 0, {"Shoal-Timeout-Ms": "9000"})
            latest[message.subject] = f"{b}:{serial}"
            effects = core.put(Delivered(core.now, message, AckToken(f"{b}:{serial}"), a + 1, 0.1))
        elif kind == 2:
            effects = core.put(Tick(core.now))
        elif calls:
            call = sorted(calls)[a % len(calls)]
            effects = core.put(_completion(core, calls.pop(call), OUTCOMES[a], b, stored))
        for effect in effects:
            match effect:
                case Look(call) | Run(call) | Bury(call) | WriteAnswer(call):
                    calls[call] = effect
                case Ack(token):
                    assert f"{ANSWER}{token.partition(':')[0]}" in stored
                    settled.append(token)
                case Nak(token):
                    settled.append(token)
    assert len(settled) == len(set(settled))
    held = core.core._held
    assert all((token in settled) != (subject in held) for subject, token in latest.items())


def _completion(core: Core, effect: Any, outcome: Ran | Failed, b: int, stored: set[str]) -> Event:
    match effect:
        case Look(call, subject):
            return Looked(core.now, call, subject in stored, failed=b == 3)
        case Run(call):
            return Ended(core.now, call, outcome)
        case Bury(call):
            return Buried(core.now, call, failed=b == 3)
        case WriteAnswer(call, subject):
            if b == 3:
                return Written(core.now, call, Write.UNKNOWN)
            taken = subject in stored
            stored.add(subject)
            return Written(core.now, call, Write.TAKEN if taken else Write.STORED)
    raise AssertionError(effect)
