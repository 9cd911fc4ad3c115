"""Pure. Which pipeline of the model a waiting request runs on.

Every batcher takes from the same stream, so a request comes to any of them. Each tells the others how busy it
is, and kvstore says how much of a prompt each one's pool holds: a request goes where it would end first, so
that a conversation comes back to its blocks unless the queue there costs more than they save.

Only one that waits and that nobody has claimed is given away, and only once. What was given counts as the
taker's work until it tells its load anew; who said no is not asked again before that. With one pipeline
nothing is asked or given.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from batcher.events import BlocksLocated, GiveAway, LocateBlocks, PlacementEffect, TellLoad
from chassis.ids import BlockHash, BootId, RequestId
from chassis.messages.load import PipelineLoad

TELL_PERIOD_S = 1.0
TELL_BUSY_PERIOD_S = 0.1  # while others are there and the load changes
HEARD_TTL_S = 2.5
GAIN_MIN_S = 0.005  # a move must save this, and a fiftieth of what is left
GAIN_SHARE = 0.02
LOCATE_LEN_MAX = 64  # prompts in a call
LOOKS_MAX = 64  # waiting requests looked at again in a tick, the last first
MOVES_MAX = 16  # on their way at once
OTHERS_MAX = 256
OUTPUT_SHARE = 0.1  # of an end in the mean length of outputs


@dataclass(frozen=True, slots=True)
class Busy:
    """What a scheduler has to do."""

    prompt_tokens: int  # of prompts, to be computed
    running: int
    waiting: int
    places: int  # that are free
    places_max: int
    prompt_token_s: float
    step_s: float  # a step with one more sequence
    batch_running: int = 0  # of the batch class
    batch_waiting: int = 0
    pending_tokens: int = 0  # of work that waits, without the batch class
    oldest_since: float | None = None  # who of those waits longest; None: nobody waits
    work_s: float = 0.0  # that was done, as `work` reckons it
    work_tokens: int = 0


@dataclass(slots=True)
class _Waiting:
    prompt_len: int
    output_len_max: int
    counted: bool = False  # in the own load
    call: int = 0  # that asks where it is held
    held: dict[str, int] | None = None  # blocks of its head by pool generation, once known
    to: BootId | None = None  # to whom it is offered


@dataclass(slots=True)
class _Other:
    load: PipelineLoad
    heard_at: float
    given: int = 0  # requests since it told
    given_s: float = 0.0  # computing their prompts
    refused: bool = False
    offered: dict[RequestId, None] = field(default_factory=dict)


class Placement:
    def __init__(self, boot: BootId, block_size_tokens: int) -> None:
        self._boot = boot
        self._block_size_tokens = block_size_tokens
        self._waiting: dict[RequestId, _Waiting] = {}
        self._others: dict[BootId, _Other] = {}
        self._own: PipelineLoad | None = None
        self._own_more = 0  # that came since the own load was told, and what their prompts take
        self._own_more_s = 0.0
        self._unasked: dict[RequestId, None] = {}
        self._output_len = 0.0  # mean, 0: nothing ended yet
        self._calls = 0
        self._tell_at = 0.0
        self._told_at = float("-inf")
        self._now = 0.0

    # ---- what is known -----------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        return not self._others

    def wake_at(self) -> float:
        return self._tell_at

    def heard(self, load: PipelineLoad, now: float) -> None:
        if load.boot == self._boot:
            return
        if not load.accepting:
            self._others.pop(load.boot, None)
            return
        known = self._others.get(load.boot)
        if known is not None:
            known.load, known.heard_at, known.refused = load, now, False
            known.given, known.given_s = 0, 0.0
        elif len(self._others) < OTHERS_MAX:
            self._others[load.boot] = _Other(load, now)

    def ended(self, output_len: int) -> None:
        if output_len > 0:
            share = OUTPUT_SHARE if self._output_len else 1.0
            self._output_len += share * (output_len - self._output_len)

    # ---- who waits ---------------------------------------------------------------------------------

    def came(self, request_id: RequestId, prompt_len: int, output_len_max: int) -> None:
        """It waits here, and nobody has claimed it."""
        self._waiting[request_id] = _Waiting(prompt_len, output_len_max)
        if not self.alone:
            self._unasked[request_id] = None

    def gone(self, request_id: RequestId) -> None:
        """It runs, has ended, or is another's."""
        known = self._waiting.pop(request_id, None)
        self._unasked.pop(request_id, None)
        if known is not None and known.to is not None and (other := self._others.get(known.to)):
            other.offered.pop(request_id, None)

    def offered(self, request_id: RequestId) -> bool:
        known = self._waiting.get(request_id)
        return known is not None and known.to is not None

    def refused(self, request_id: RequestId) -> None:
        """Who was offered it does not take it, or does not answer."""
        known = self._waiting.get(request_id)
        if known is None or known.to is None:
            return
        other = self._others.get(known.to)
        if other is not None:
            other.refused = True
            other.offered.pop(request_id, None)
        known.to = None

    # ---- what is done ------------------------------------------------------------------------------

    def asks(self, chain: Callable[[RequestId], tuple[BlockHash, ...]]) -> tuple[PlacementEffect, ...]:
        """Where are those held that came since the last call? `chain`: the blocks that a cache may hold."""
        effects = []
        generations = tuple(dict.fromkeys(other.load.pool_generation for other in self._others.values()))
        while self._unasked:
            batch = tuple(list(self._unasked)[:LOCATE_LEN_MAX])
            self._calls += 1
            for request_id in batch:
                del self._unasked[request_id]
                self._waiting[request_id].call = self._calls
            effects.append(LocateBlocks(self._calls, batch, tuple(map(chain, batch)), generations))
        return tuple(effects)

    def located(self, event: BlocksLocated) -> tuple[PlacementEffect, ...]:
        self._now = event.now
        effects: list[PlacementEffect] = []
        for i, request_id in enumerate(event.request_ids):
            known = self._waiting.get(request_id)
            if known is None or known.call != event.call:
                continue
            known.held = {generation: blocks[i] for generation, blocks in event.found if blocks[i]}
            effects += self._settle(request_id, known)
        return tuple(effects)

    def tick(self, now: float, accepting: bool, generation: str, busy: Busy) -> tuple[PlacementEffect, ...]:
        """Tells the load when that is due, and looks again at those that wait."""
        if now < self._tell_at:
            return ()
        self._now = now
        for boot in [b for b, other in self._others.items() if other.heard_at < now - HEARD_TTL_S]:
            del self._others[boot]
        load = self._load(accepting, generation, busy)
        self._tell_at = now + (TELL_PERIOD_S if self.alone else TELL_BUSY_PERIOD_S)
        effects: list[PlacementEffect] = []
        if load != self._own or now >= self._told_at + TELL_PERIOD_S:
            effects.append(TellLoad(load))
            self._told_at = now
        self._own, self._own_more, self._own_more_s = load, 0, 0.0
        for known in self._waiting.values():
            known.counted = True
        if not self.alone:
            effects += self._look_again()
        return tuple(effects)

    def _look_again(self) -> list[PlacementEffect]:
        effects: list[PlacementEffect] = []
        for request_id in list(reversed(self._waiting))[:LOOKS_MAX]:
            known = self._waiting[request_id]
            if known.held is not None:
                effects += self._settle(request_id, known)
            elif not known.call:
                self._unasked[request_id] = None
        return effects

    def _settle(self, request_id: RequestId, known: _Waiting) -> list[PlacementEffect]:
        """Stay, or be offered to who would end it first."""
        assert known.held is not None
        moving = sum(len(other.offered) for other in self._others.values())
        if known.to is not None or self._own is None or moving >= MOVES_MAX:
            return []
        here = self._cost(self._own, known, known.held, self._own_more, self._own_more_s)
        if not self._own.accepting:  # what begins here now would be interrupted
            here = inf
        elif known.counted:  # what it waits for does not include itself
            here -= self._prompt_s(self._own, known, known.held)
        best, least = None, here
        for other in self._others.values():
            if other.refused:
                continue
            cost = self._cost(other.load, known, known.held, other.given, other.given_s)
            if cost < least:
                best, least = other, cost
        if best is None or here - least < GAIN_MIN_S + GAIN_SHARE * least:
            if not known.counted:
                self._own_more += 1
                self._own_more_s += self._prompt_s(self._own, known, known.held)
                known.counted = True
            return []
        best.given += 1
        best.given_s += self._prompt_s(best.load, known, known.held)
        best.offered[request_id] = None
        known.to = best.load.boot
        return [GiveAway(self._now, request_id, best.load.boot)]

    # ---- what it would cost ------------------------------------------------------------------------

    def _load(self, accepting: bool, generation: str, busy: Busy) -> PipelineLoad:
        residence_s = self._expected(None) * busy.step_s
        place_s = residence_s / busy.places_max
        queued = max(0, busy.waiting - busy.places)
        return PipelineLoad(
            boot=self._boot,
            pool_generation=generation,
            accepting=accepting,
            wait_s=busy.prompt_tokens * busy.prompt_token_s + queued * place_s,
            places=max(0, busy.places - busy.waiting),
            place_s=place_s,
            prompt_token_s=busy.prompt_token_s,
            output_token_s=busy.step_s,
            running=busy.running - busy.batch_running,
            waiting=busy.waiting - busy.batch_waiting,
            pending_tokens=busy.pending_tokens,
            oldest_wait_s=0.0 if busy.oldest_since is None else max(0.0, self._now - busy.oldest_since),
            work_s=busy.work_s,
            work_tokens=busy.work_tokens,
        )

    def _expected(self, output_len_max: int | None) -> float:
        """How long an output will be, by those that ended."""
        if output_len_max is None:
            return self._output_len
        return min(self._output_len or output_len_max, output_len_max)

    def _prompt_s(self, load: PipelineLoad, known: _Waiting, held: dict[str, int]) -> float:
        cached = held.get(load.pool_generation, 0) * self._block_size_tokens
        return max(0, known.prompt_len - cached) * load.prompt_token_s

    def _cost(
        self, load: PipelineLoad, known: _Waiting, held: dict[str, int], more: int, more_s: float
    ) -> float:
        """Seconds to its end there, if `more` requests came since that load was told."""
        wait_s = load.wait_s + more_s + max(0, more + 1 - load.places) * load.place_s
        output_s = self._expected(known.output_len_max) * load.output_token_s
        return wait_s + self._prompt_s(load, known, held) + output_s

    def check(self) -> None:
        for boot, other in self._others.items():
            assert boot != self._boot
            for request_id in other.offered:
                assert self._waiting[request_id].to == boot
        assert all(request_id in self._waiting for request_id in self._unasked)
