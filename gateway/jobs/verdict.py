"""Pure. What an outcome means for its job: an answer, another try later, or a try under another request.

Rules: what the user got wrong is an answer at once; what is only full, gone for now or somebody else's waits;
a model that is not there waits as long as the gateway is told to; what failed is dead, and says so.
"""

from dataclasses import dataclass, field

from chassis.errors import Code
from chassis.messages.jobs import CANCELLED, EXPIRED, Answer, answer_id
from chassis.messages.request import Reason
from gateway.http_errors import STATUS_OF
from gateway.jobs.events import Failed, Ran, Reply

DELAY_FIRST_S = 1.0
DELAY_MAX_S = 30.0
REFUSALS_MAX = 64  # by a queue's policy, each of a request of its own
MISSING_LEN_MAX = 1024  # models
BREAK_S = 3 * DELAY_MAX_S  # a model not missed for so long was there meanwhile, for all that is known


@dataclass(frozen=True, slots=True)
class Later:
    """It goes back to the stream."""

    retry_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Anew:
    """Its request is over without having been run: another is made of it, after a while."""


Verdict = Reply | Later | Anew


@dataclass(slots=True)
class Missing:
    """Models that are not served: since when without a break, and when last missed."""

    wait_s: float
    _models: dict[str, tuple[float, float]] = field(default_factory=dict)

    def is_over(self, now: float, model: str) -> bool:
        """Notes that it is missed; whether that has lasted long enough to say so."""
        since, last = self._models.pop(model, (now, now))
        if now - last > BREAK_S:
            since = now
        self._models[model] = (since, now)
        if len(self._models) > MISSING_LEN_MAX:
            del self._models[next(iter(self._models))]
        return now - since >= self.wait_s

    def is_there(self, model: str) -> None:
        self._models.pop(model, None)


def judge(outcome: Ran | Failed, model: str, refusals: int, missing: Missing, now: float) -> Verdict:
    match outcome:
        case Ran(status_code=404):
            return Reply(_of_run(outcome)) if missing.is_over(now, model) else Later()
        case Failed(code=Code.NOT_FOUND):
            return _error(outcome, 404) if missing.is_over(now, model) else Later()
        case Ran(status_code=429 | 503):
            return Later()
        case Ran():
            missing.is_there(model)
            return Reply(_of_run(outcome))
        case Failed():
            return _judge_failed(outcome, refusals)


def _of_run(ran: Ran) -> Answer:
    if Reason.CANCELLED in ran.reasons:
        return stopped(ran.request_id, CANCELLED, "The request was cancelled.")
    if Reason.DEADLINE in ran.reasons:
        return expired(ran.request_id)
    body = None if ran.body is None else dict(ran.body)
    return Answer(answer_id(ran.request_id), ran.request_id, ran.status_code, body, ran.events)


def _judge_failed(failed: Failed, refusals: int) -> Verdict:
    terminal = failed.terminal
    match failed.code:
        case Code.UNAVAILABLE if terminal is not None and terminal.reason is Reason.REFUSED:
            # its record stands: under the same id it would be refused for ever
            return Anew() if refusals < REFUSALS_MAX else _error(failed, 503)
        case Code.RESOURCE_EXHAUSTED if failed.retry_ms is None:
            return _error(failed, 429)  # larger than the whole quota
        case Code.UNAVAILABLE | Code.RESOURCE_EXHAUSTED | Code.ABORTED:
            # ABORTED: another call has its stream, or the record has its end by now
            return Later(failed.retry_ms)
        case Code.CANCELLED:
            return Later()  # its end is not confirmed yet
        case Code.DEADLINE_EXCEEDED:
            return Reply(expired(failed.request_id, failed.message))
        case Code.INTERNAL:
            dead = terminal is not None and terminal.reason is Reason.FAILED
            return _error(failed, 500, dead)
        case code:
            return _error(failed, STATUS_OF[code])


def _error(failed: Failed, status: int, dead: bool = False) -> Reply:
    answer = Answer(
        answer_id(failed.request_id),
        failed.request_id,
        status,
        None if failed.body is None else dict(failed.body),
        error_code=failed.code.value.lower(),
        error=failed.message,
    )
    return Reply(answer, dead)


def expired(request_id: str, why: str = "The job's time was over before its end.") -> Answer:
    return stopped(request_id, EXPIRED, why)


def stopped(request_id: str, code: str, why: str) -> Answer:
    return Answer(answer_id(request_id), request_id, 0, error_code=code, error=why)


def delay_s(count: int, seq: int, retry_ms: int | None = None) -> float:
    """Until the next try: 1 s, doubled with each delivery up to 30 s, spread by a half so that a crowd that
    was refused together does not come back together."""
    base = min(DELAY_MAX_S, DELAY_FIRST_S * float(1 << min(max(count - 1, 0), 10)))
    return max(base, (retry_ms or 0) / 1000) * (0.75 + seq % 64 / 128)
