"""Pure. What the batcher knows of one request it holds, and the terminal record that follows from it.

`ids` is the output that was made or forced, whoever has seen it; `claimed` says that the last record
known is a claim of this boot, `live` that the scheduler has the sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from batcher.audience import Audience
from batcher.events import Ended
from chassis.ids import AckToken, Attempt, BootId, RequestId
from chassis.messages.chunk import EMPTY_DIGEST, extend_digest
from chassis.messages.ownership import CancelAsk
from chassis.messages.request import Cancel, Claim, Reason, Record, Request, Terminal, Timings, Usage
from chassis.messages.sampling import UNTOLD, PromptTold, TokenLogprobs, recorded


class State(Enum):
    NONE = "none"
    WAITING = "waiting"
    READING = "reading"
    ASKING = "asking"
    CLAIMING = "claiming"
    TAKEOVER = "takeover"
    RUNNING = "running"
    VERIFYING = "verifying"
    WRITING = "writing"
    FINISHING = "finishing"
    LEAVING = "leaving"


@dataclass(slots=True)
class Holding:
    request: Request
    token: AckToken  # the newest
    age_s: float  # when first delivered here
    delivered_at: float
    deadline: float | None
    accepted_ms: int = 0  # the broker's wall clock
    number: int = 0  # counts what this batcher began
    given: bool = False  # by another batcher
    state: State = State.NONE
    timer_at: float | None = None  # of the state: silence, a round of questions, the next read
    call: int = 0  # of the completion that is waited for; 0: none
    failures: int = 0  # of reads and writes in a row
    # the log
    expected_seq: int = 0
    named: Claim | Cancel | None = None  # the record whose owner is asked
    claimed: bool = False
    attempt: Attempt = Attempt(0)  # of my claim
    seen_attempt: Attempt = Attempt(0)  # of the last record read or written
    wanted: Attempt = Attempt(0)
    writing: Record | None = None
    stored: Terminal | None = None  # the end that its receipt is to tell
    leaves_as: str = ""  # once that is written
    # the sequence
    live: bool = False
    ids: list[int] = field(default_factory=list)
    digest: int = EMPTY_DIGEST
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one an id, if the request asks for them
    prompt: PromptTold | None = None  # if the request asks for it, once it is known
    forced: bool = False  # in this attempt
    ended: Ended | None = None
    account: tuple[Usage, Timings] | None = None  # the scheduler's, of a sequence stopped for its end
    why: Reason | None = None  # it ends, whatever else becomes of it
    error: str = ""
    admitted_at: float | None = None
    first_token_at: float | None = None
    taken_over: bool = False
    # the gateways
    audience: Audience = field(default_factory=Audience)
    takeover_round: int = 0
    # poison
    worker_deaths: int = 0
    worker_deaths_claimed: int = 0
    batcher_deaths: int = 0
    poison: bool = False

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def deaths(self) -> int:
        return self.worker_deaths + self.batcher_deaths

    def wake_at(self) -> float | None:
        """When this request needs a Tick. A count without gateways acts only while it runs."""
        times = [self.timer_at]
        if self.why is None:
            times.append(self.deadline)
        if self.state is State.RUNNING:
            times += [self.audience.count_ends, self.audience.ask_at]
        return min((t for t in times if t is not None), default=None)

    def is_late(self, now: float) -> bool:
        return self.why is None and self.deadline is not None and self.deadline <= now

    def fits(self, ids: Sequence[int]) -> bool:
        return len(ids) <= self.request.limits.max_tokens

    def starts_with(self, ids: Sequence[int]) -> bool:
        """Whether `ids` is a prefix of the output."""
        return len(ids) <= len(self.ids) and tuple(self.ids[: len(ids)]) == tuple(ids)

    def extend(self, ids: Sequence[int], now: float, told: TokenLogprobs | None = None) -> None:
        """`told`: of the first of them."""
        if self.first_token_at is None and ids:
            self.first_token_at = now
        self.ids.extend(ids)
        self.digest = extend_digest(self.digest, ids)
        if self.request.sampling.logprobs is not None and ids:
            self.logprobs.append(told or UNTOLD)
            self._tell_rest()

    def force(self, ids: Sequence[int]) -> None:
        """The output so far is `ids`, whatever was made here. An end that was found on the other is void."""
        if self.request.sampling.logprobs is not None:
            same = 0
            while same < min(len(ids), len(self.ids)) and ids[same] == self.ids[same]:
                same += 1
            self.logprobs = self.logprobs[:same]
        self.ids = list(ids)
        self.digest = extend_digest(EMPTY_DIGEST, ids)
        self.audience.rewind(len(self.ids))
        if self.request.sampling.logprobs is not None:
            self._tell_rest()
        self.ended = self.account = None
        if self.why in (Reason.STOP, Reason.LENGTH):
            self.why = None

    def learn(self, told: Sequence[TokenLogprobs], prompt: PromptTold | None = None) -> None:
        """Log probabilities of the first ids, from who has them: what is known here stays."""
        self.learn_prompt(prompt)
        for i, entry in enumerate(told[: len(self.logprobs)]):
            if not self.logprobs[i].rank:
                self.logprobs[i] = entry

    def learn_prompt(self, told: PromptTold | None) -> None:
        """From who has it: what is known here stays, and so does it whatever becomes of the output."""
        request = self.request
        fits = told is not None and told.ids == request.prompt_ids[1:]
        if self.prompt is None and fits and request.sampling.prompt_logprobs is not None:
            self.prompt = told

    def _tell_rest(self) -> None:
        self.logprobs += [UNTOLD] * (len(self.ids) - len(self.logprobs))

    def take(self, claim: Claim, seq: int) -> None:
        """My claim is the last record."""
        if claim.attempt != self.attempt:
            self.forced = False
        self.claimed = True
        self.attempt = self.seen_attempt = claim.attempt
        self.expected_seq = seq
        self.worker_deaths_claimed = claim.worker_deaths
        self.worker_deaths = max(self.worker_deaths, claim.worker_deaths)
        self.batcher_deaths = max(self.batcher_deaths, claim.batcher_deaths)

    def lose_claim(self) -> None:
        """Another may have written: what was made here counts no longer."""
        self.force(())
        self.claimed, self.attempt = False, Attempt(0)

    def terminal(self, boot: BootId, now: float) -> Terminal:
        assert self.why is not None
        ended = self.ended
        judged = ended is not None and ended.reason is self.why
        if ended is not None:
            usage, timings = ended.usage, self._whole(ended.timings, now)
        elif self.account is not None:
            usage, timings = self.account[0], self._whole(self.account[1], now)
        else:
            usage, timings = Usage(prompt_tokens=len(self.request.prompt_ids)), self._timings(now)
        return Terminal(
            attempt=Attempt(max(self.attempt, self.seen_attempt)),
            boot=boot,
            reason=self.why,
            output_ids=tuple(self.ids),
            byte_cut=ended.byte_cut if ended is not None and judged else None,
            usage=replace(usage, output_tokens=len(self.ids)),
            timings=timings,
            error=self.error if judged or self.why is Reason.FAILED else "",
            retry_ms=ended.retry_ms if ended is not None and judged else 0,
            tenant=self.request.tenant,
            body_digest=self.request.body_digest,
            model=self.request.model,
            stop=self.request.limits.stop,
            logprobs=recorded(self.logprobs),
            prompt=self.prompt if self.ids else None,
            key=self.request.key,
            priority=self.request.priority,
            choice=self.request.choice,
            accepted_ms=self.accepted_ms,
            worker_deaths=self.worker_deaths,
            batcher_deaths=self.batcher_deaths,
        )

    def _whole(self, made: Timings, now: float) -> Timings:
        """The scheduler's rows; what it did not see (another owner, claims, questions) is interruption."""
        rows = made.queued_us + made.waiting_us + made.prefill_us + made.decode_us + made.interrupted_us
        missing = _us(self.age_s + now - self.delivered_at) - rows
        return replace(made, interrupted_us=made.interrupted_us + max(0, missing))

    def _timings(self, now: float) -> Timings:
        """Rows by the own clock, for ends that the scheduler did not see."""
        queued = _us(self.age_s)
        total = _us(self.age_s + now - self.delivered_at)
        admitted, first = (
            total if at is None else min(total, _us(self.age_s + at - self.delivered_at))
            for at in (self.admitted_at, self.first_token_at)
        )
        first = max(first, admitted)
        return Timings(
            queued_us=queued,
            waiting_us=0 if self.taken_over else admitted - queued,
            prefill_us=first - admitted,
            decode_us=total - first,
            interrupted_us=admitted - queued if self.taken_over else 0,
        )

    def check(self) -> None:
        assert self.state is not State.NONE
        assert self.digest == extend_digest(EMPTY_DIGEST, self.ids)
        assert len(self.ids) <= self.request.limits.max_tokens
        asked = self.request.sampling.logprobs is not None
        assert len(self.logprobs) == (len(self.ids) if asked else 0)
        assert all(0 <= index <= len(self.ids) for index in self.audience.next_index.values())
        assert not (self.live and self.ended is not None), "an end is the last word of a run"
        if self.state in (State.TAKEOVER, State.RUNNING, State.VERIFYING):
            assert self.claimed and self.expected_seq > 0 and self.attempt > 0
        match self.state:
            case State.WAITING:
                assert self.live and not self.claimed and not self.ids and self.expected_seq == 0
            case State.RUNNING:
                assert self.live and self.why is None
            case State.READING | State.ASKING:
                assert not self.live and not self.claimed and not self.ids
            case State.WRITING:
                assert not self.live and self.why is not None and isinstance(self.writing, Terminal)
            case State.CLAIMING:
                assert isinstance(self.writing, Claim)
            case State.FINISHING:
                assert not self.live and self.stored is not None and self.why is not None
            case State.LEAVING:
                assert not self.live and isinstance(self.writing, Claim) and self.timer_at is not None


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def end_of(cancel: Cancel | CancelAsk) -> Reason:
    """A gateway that waited in vain for the deadline's end cancels too: nobody wished that."""
    return Reason.DEADLINE if cancel.reason == "deadline" else Reason.CANCELLED
