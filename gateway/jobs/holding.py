"""Pure. The jobs that one gateway holds: LOOKING -> RUNNING -> (BURYING ->) WRITING -> acknowledged.

Rules: a job is acknowledged only once its answer is known to be stored; one that is held is never started
again, a new delivery of it only brings the token that settles it; whatever cannot go on now goes back to the
stream with a delay, except an answer, which is kept and written again.
"""

import itertools
from dataclasses import dataclass, field
from enum import Enum

from chassis.bus import Stored
from chassis.ids import AckToken
from chassis.job_subjects import JobName, answer_of, parse_job
from chassis.messages import BadMessage
from chassis.messages.jobs import (
    TRACEPARENT,
    Answer,
    BadJob,
    Form,
    Job,
    Terms,
    answer_headers,
    answer_id,
    build_answer,
    parse_terms,
)
from chassis.messages.jobs import (
    parse_job as parse_body,
)
from chassis.subjects import REQUEST_TIME_MAX_S
from gateway.admission import request_id_of
from gateway.jobs.events import (
    Ack,
    Buried,
    Bury,
    Count,
    Delivered,
    Effect,
    Ended,
    Event,
    LetGo,
    Look,
    Looked,
    Nak,
    Progress,
    Reply,
    Run,
    Stop,
    Tick,
    Write,
    WriteAnswer,
    Written,
)
from gateway.jobs.verdict import Anew, Later, Missing, delay_s, expired, judge

PRIORITY = 9  # the batch class
OTHER_BODY_DELAY_S = 1.0


class State(Enum):
    LOOKING = "looking"  # for an answer
    RUNNING = "running"
    RESTING = "resting"  # before its next request
    BURYING = "burying"
    WRITING = "writing"


@dataclass(slots=True)
class Held:
    message: Stored
    token: AckToken
    count: int
    expires_at: float | None = None
    name: JobName | None = None
    job: Job | None = None
    form: Form = Form.JSON
    custom_id: str = ""
    priority: int = PRIORITY
    key: str = ""
    state: State = State.LOOKING
    call: int = 0  # the completion that is awaited; 0: none, but `due`
    due: float | None = None
    tries: int = 0  # at what it is at
    refusals: int = 0
    answer: Answer | None = None
    wrong: str = ""  # why it cannot be run

    @property
    def subject(self) -> str:
        return self.message.subject

    @property
    def request_id(self) -> str:
        name = self.name
        return request_id_of(name.tenant, name.client_key) if name is not None else ""


@dataclass(slots=True)
class Holding:
    len_max: int
    priority_best: int
    missing: Missing
    _held: dict[str, Held] = field(default_factory=dict)  # by subject
    _calls: dict[int, Held] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _out: list[Effect] = field(default_factory=list)
    _now: float = 0.0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def room(self) -> int:
        return max(0, self.len_max - len(self._held))

    def handle(self, event: Event) -> list[Effect]:
        """One step. Effects are to be performed in order."""
        self._out, self._now = [], event.now
        match event:
            case Delivered():
                self._delivered(event)
            case LetGo():
                self._let_go()
            case Tick():
                self._tick()
            case _:
                held = self._calls.pop(event.call, None)
                if held is not None:
                    held.call = 0
                    self._completed(held, event)
        return self._out

    def check(self) -> None:
        """What holds after every event."""
        for subject, held in self._held.items():
            assert held.subject == subject
            assert (held.call == 0) == (held.due is not None), "nobody wakes it"
            assert held.call == 0 or self._calls[held.call] is held
            assert held.state not in (State.BURYING, State.WRITING) or held.answer is not None
        assert len(self._calls) <= len(self._held)

    # ---- rows ----------------------------------------------------------------------------------------

    def _delivered(self, e: Delivered) -> None:
        known = self._held.get(e.message.subject)
        if known is not None and known.message.seq == e.message.seq:
            known.token, known.count = e.token, e.count  # redelivery: what runs goes on
            return
        if known is not None:  # the one held was acknowledged elsewhere, and another came under its subject
            self._out.append(Nak(e.token, OTHER_BODY_DELAY_S))
            return
        held = Held(e.message, e.token, e.count)
        self._read(held, e.age_s)
        self._held[held.subject] = held
        self._ask(held, Look(self._call(held), answer_of(held.subject)))

    def _read(self, held: Held, age_s: float) -> None:
        """Names what is wrong with it, if anything. That is said once it is known that it has no answer."""
        message = held.message
        terms = Terms()
        held.name = parse_job(message.subject)
        try:
            held.job = parse_body(message.data, message.headers)
            held.form, held.custom_id = held.job.form, held.job.custom_id
            terms = parse_terms(message.headers)
        except BadJob as error:
            held.form, held.custom_id, held.wrong = error.form, error.custom_id, str(error)
        except BadMessage as error:
            held.wrong = str(error)
        if held.name is None:
            held.wrong = "subject: shoal.job.<tenant>.<queue>.<key>, and no name is written as these tokens"
        if terms.timeout_ms is not None:
            held.expires_at = self._now - age_s + terms.timeout_ms / 1000
        held.key = terms.key
        if terms.priority is not None:
            held.priority = max(terms.priority, self.priority_best)

    def _completed(self, held: Held, e: Event) -> None:
        match held.state, e:
            case State.LOOKING, Looked(failed=True):
                self._back(held)
            case State.LOOKING, Looked(found=True):
                self._done(held)
            case State.LOOKING, Looked():
                self._begin(held)
            case State.RUNNING, Ended():
                self._ended(held, e)
            case State.BURYING, Buried(failed=True):
                self._rest(held)
            case State.BURYING, Buried():
                self._write(held)
            case State.WRITING, Written():
                self._written(held, e.outcome)
            case _:
                raise AssertionError(f"{e} in {held.state}")

    def _begin(self, held: Held) -> None:
        """Runs it, or says why not."""
        if held.wrong:
            request_id = held.request_id
            self._say(
                held,
                Answer(
                    answer_id(request_id), request_id, 400, error=held.wrong, error_code="invalid_argument"
                ),
            )
            return
        left_s = self._left_s(held)
        if left_s <= 0:
            self._say(held, expired(held.request_id))
            return
        assert held.name is not None and held.job is not None
        held.state = State.RUNNING
        left_ms = max(1, int(min(left_s, REQUEST_TIME_MAX_S) * 1000))
        trace_parent = next((v for k, v in held.message.headers.items() if k.lower() == TRACEPARENT), "")
        self._ask(
            held,
            Run(
                self._call(held),
                held.name,
                held.job,
                held.refusals,
                held.priority,
                left_ms,
                trace_parent,
                held.key,
            ),
        )

    def _left_s(self, held: Held) -> float:
        return float("inf") if held.expires_at is None else held.expires_at - self._now

    def _ended(self, held: Held, e: Ended) -> None:
        assert held.job is not None
        match judge(e.outcome, held.job.model, held.refusals, self.missing, self._now):
            case Reply(answer, dead):
                self._say(held, answer, dead)
            case Later(retry_ms):
                self._back(held, retry_ms)
            case Anew():
                held.refusals += 1
                held.state = State.RESTING
                self._rest(held)

    def _say(self, held: Held, answer: Answer, dead: bool = False) -> None:
        held.answer, held.tries = answer, 0
        held.state = State.BURYING if dead else State.WRITING
        self._go_on(held)

    def _go_on(self, held: Held) -> None:
        match held.state:
            case State.BURYING:
                assert held.answer is not None
                bury = Bury(self._call(held), held.message, held.answer.request_id, held.answer.error)
                self._ask(held, bury)
            case State.WRITING:
                self._write(held)
            case State.RESTING:  # somebody may have answered it meanwhile, to cancel it
                held.state = State.LOOKING
                self._ask(held, Look(self._call(held), answer_of(held.subject)))
            case _:
                raise AssertionError(held.state)

    def _write(self, held: Held) -> None:
        answer = held.answer
        assert answer is not None
        held.state = State.WRITING
        data = build_answer(answer, held.form, held.custom_id)
        headers = answer_headers(answer, held.form, held.message.data)
        self._ask(held, WriteAnswer(self._call(held), answer_of(held.subject), data, headers))

    def _written(self, held: Held, outcome: Write) -> None:
        match outcome:
            case Write.STORED | Write.TAKEN:
                self._done(held)
            case Write.UNKNOWN:
                self._rest(held)
            case Write.TOO_LARGE:
                answer = held.answer
                assert answer is not None
                why = "answer: larger than a message of the bus may be; ask for fewer tokens"
                too_large = Answer(answer.id, answer.request_id, 500, error=why, error_code="internal")
                self._out.append(Count("answer too large"))
                self._say(held, too_large)

    def _done(self, held: Held) -> None:
        self._drop(held)
        self._out.append(Ack(held.token))

    def _back(self, held: Held, retry_ms: int | None = None) -> None:
        """To the stream; if its time is over sooner, for no longer than that."""
        wait_s = delay_s(held.count, held.message.seq, retry_ms)
        self._drop(held)
        self._out.append(Nak(held.token, max(0.0, min(wait_s, self._left_s(held)))))

    def _rest(self, held: Held) -> None:
        held.tries += 1
        held.due = self._now + delay_s(held.tries, held.message.seq)

    def _let_go(self) -> None:
        for held in tuple(self._held.values()):
            if held.state is State.WRITING and held.call:
                continue  # it is nearly there
            if held.call and held.state is State.RUNNING:
                self._out.append(Stop(held.call))
            self._drop(held)
            self._out.append(Nak(held.token, 0.0))

    def _tick(self) -> None:
        for held in tuple(self._held.values()):
            self._out.append(Progress(held.token))
            if held.due is not None and held.due <= self._now:
                held.due = None
                self._go_on(held)

    # ---- calls ---------------------------------------------------------------------------------------

    def _call(self, held: Held) -> int:
        number = next(self._numbers)
        held.call, held.due = number, None
        self._calls[number] = held
        return number

    def _ask(self, held: Held, effect: Effect) -> None:
        self._out.append(effect)

    def _drop(self, held: Held) -> None:
        self._calls.pop(held.call, None)
        del self._held[held.subject]
