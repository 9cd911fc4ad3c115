"""Pure. One request as the scheduler sees it: its ids, how far they are computed, where its KV lies.

`num_computed` counts tokens of steps that were sent, `num_proven` of steps that came back. A step in
flight that samples has `num_computed == num_tokens`, so a sequence needs a step exactly while it is less. One
more is the step behind it, sent ahead: it computes the token that is not known yet, and there is but one.
"""

from collections.abc import Sequence as SequenceOf
from enum import Enum

from batcher.block_hash import BlockHasher
from batcher.prompts import prompt_of
from batcher.queueing import Place
from batcher.stops import Watch
from chassis.ids import BlockHash, BlockId, Slot
from chassis.messages.kvstore import keep_of_priority
from chassis.messages.pipeline import SlotStart
from chassis.messages.request import Request, Timings, Usage
from chassis.sequence_digest import carried_on


class Status(Enum):
    WAITING = "waiting"  # in the order, nothing known
    MATCHING = "matching"  # kvstore was asked for its prefix
    MATCHED = "matched"  # holds the blocks of its cached prefix, if any
    RUNNING = "running"
    ENDED = "ended"


class Phase(Enum):
    """Rows of the ledger that the scheduler fills."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    INTERRUPTED = "interrupted"


class Clock:
    """Splits a request's time among phases in whole microseconds, so that they sum exactly."""

    __slots__ = ("_since_us", "_spent_us", "phase", "queued_us")

    def __init__(self, now: float, queued_s: float, phase: Phase, interrupted_s: float = 0.0) -> None:
        self.queued_us = max(0, round(queued_s * 1e6))
        self._since_us = round(now * 1e6)
        self.phase = phase
        self._spent_us = dict.fromkeys(Phase, 0)
        self._spent_us[Phase.INTERRUPTED] = max(0, round(interrupted_s * 1e6))

    def enter(self, phase: Phase, now: float) -> None:
        now_us = max(self._since_us, round(now * 1e6))
        self._spent_us[self.phase] += now_us - self._since_us
        self._since_us = now_us
        self.phase = phase

    def timings(
        self, now: float, preemptions: int, recomputed_tokens: int, stage_compute_us: tuple[int, ...] = ()
    ) -> Timings:
        self.enter(self.phase, now)
        spent = self._spent_us
        return Timings(
            queued_us=self.queued_us,
            waiting_us=spent[Phase.WAITING],
            prefill_us=spent[Phase.PREFILL],
            decode_us=spent[Phase.DECODE],
            interrupted_us=spent[Phase.INTERRUPTED],
            preemptions=preemptions,
            recomputed_tokens=recomputed_tokens,
            stage_compute_us=stage_compute_us,
        )


class Sequence:
    __slots__ = (
        "admitted",
        "alone",
        "blocks",
        "borrowed",
        "cached_tokens",
        "claimed",
        "clock",
        "deadline",
        "digested",
        "fresh",
        "hasher",
        "hashes",
        "ids",
        "incarnation",
        "num_committed",
        "num_computed",
        "num_proven",
        "num_sent_blocks",
        "num_written",
        "order",
        "place",
        "preemptions",
        "prompt",
        "prompt_len",
        "recomputed_tokens",
        "request",
        "slot",
        "stage_ns",
        "status",
        "uncached",
        "watch",
    )

    def __init__(
        self,
        request: Request,
        output_ids: SequenceOf[int],
        watch: Watch,
        hasher: BlockHasher,
        clock: Clock,
        order: tuple[int, int],
        deadline: float | None = None,
        claimed: bool = False,
        alone: bool = False,
        place: Place | None = None,
    ) -> None:
        self.request = request
        self.prompt_len = len(request.prompt_ids)
        self.ids: list[int] = [*request.prompt_ids, *output_ids]
        self.prompt = prompt_of(request, output_ids)  # None: nothing is to be told of it
        self.watch = watch
        self.hasher = hasher
        self.clock = clock
        self.order = order
        self.place = place or Place()
        self.deadline = deadline
        self.claimed = claimed  # goes before those that are not
        self.alone = alone
        self.admitted = claimed  # `Admitted` was noted, or is not wanted
        self.status = Status.WAITING
        self.slot: Slot | None = None
        self.fresh = True
        self.incarnation = 0  # rows of an earlier one are ghosts
        self.blocks: list[BlockId] = []
        self.borrowed = False  # the last block is another's, which writes it: not to be written
        self.hashes: list[BlockHash] = []  # of full blocks, as far as they were needed
        self.num_computed = 0
        self.num_proven = 0
        self.num_committed = 0  # blocks at the head of the table with known content
        self.num_sent_blocks = 0  # of the table, to the workers
        self.num_written = 0  # tokens ever computed and returned: below it, computing is repeating
        self.digested = (0, hasher.root)  # so many ids, and what they amount to
        self.uncached = False  # a cached prefix was not what it was said to be: it takes none
        self.cached_tokens: int | None = None  # None: not yet admitted
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.stage_ns: list[int] = []  # its share of what each stage computed

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def growth_tokens(self) -> int:
        """Output it may still write."""
        return self.watch.length_max - self.watch.length

    @property
    def keep(self) -> int:
        """How long kvstore is to keep what it computed."""
        return keep_of_priority(self.request.priority)

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.ids[self.prompt_len :])

    @property
    def num_match_blocks(self) -> int:
        """Full blocks a cached prefix may cover: the last token is always computed, and what the prompt's log
        probabilities need."""
        covered = len(self.ids) - 1
        if self.prompt is not None:
            covered = min(covered, self.prompt.num_covered)
        return covered // self.hasher.block_size_tokens

    def chain(self, num_blocks: int) -> list[BlockHash]:
        """Hashes of the first `num_blocks` full blocks (perhaps of more)."""
        if len(self.hashes) < num_blocks:
            self.hasher.extend(self.hashes, self.ids, num_blocks)
        return self.hashes

    def digest(self, num_ids: int) -> int:
        """What the first ids amount to, as workers reckon it; carried on from the last time."""
        known, digest = self.digested
        if num_ids < known:
            known, digest = 0, self.hasher.root
        self.digested = num_ids, carried_on(digest, self.ids[known:num_ids], known)
        return self.digested[1]

    def fall_back(self, num_computed: int) -> None:
        """Steps in flight are void; the first `num_computed` tokens are still in the pool."""
        assert num_computed <= self.num_proven or num_computed == 0
        self.incarnation += 1
        self.num_computed = self.num_proven = num_computed
        self.fresh = True

    def charge(self, num_tokens: int, token_ns: SequenceOf[int]) -> None:
        """A step computed so many of its tokens; each took so long at each stage."""
        spent = self.stage_ns
        if len(spent) < len(token_ns):
            spent += [0] * (len(token_ns) - len(spent))
        for stage, ns in enumerate(token_ns):
            spent[stage] += num_tokens * ns

    def carry_on(self, before: "Sequence") -> None:
        """It is the same request, started again with other output."""
        self.admitted = True
        self.cached_tokens = before.cached_tokens
        self.preemptions = before.preemptions
        self.recomputed_tokens = before.recomputed_tokens
        self.stage_ns = before.stage_ns
        self.num_written = min(before.num_written, len(self.ids))
        if self.prompt is not None and before.prompt is not None:
            self.prompt = before.prompt

    @property
    def follows(self) -> bool:
        """Its sampling is a function of the ids so far."""
        return self.request.sampling.follows

    @property
    def num_told(self) -> int:
        """Ids in the `slot_start` of a row that begins where this one stands."""
        sampling, listed = self.request.sampling, 0
        shaping, grammar = sampling.shaping, sampling.grammar
        if shaping is not None:
            listed += 2 * len(shaping.logit_bias) + len(shaping.allowed_ids)
            listed += sum(map(len, shaping.bad_words))
        if grammar is not None:
            listed += len(grammar.text)  # at most four bytes a character, as ids
        return listed + (self.num_computed if sampling.follows else 0)

    def slot_start(self, start: int) -> SlotStart:
        """For a row that begins at position `start`: workers see the ids from there on in steps, and need
        those before it only where the sampling follows them."""
        request, sampling = self.request, self.request.sampling
        if sampling.shaping is None and sampling.grammar is None and not request.limits.min_tokens:
            return SlotStart(sampling, request.seed)
        follows = self.follows
        min_tokens, stop_ids = request.limits.min_tokens, self.watch.stop_ids
        barred = bool(stop_ids) and len(self.ids) - self.prompt_len < min_tokens
        return SlotStart(
            sampling,
            request.seed,
            prompt_len=self.prompt_len if follows else 0,
            before=tuple(self.ids[:start]) if follows else (),
            min_tokens=min_tokens if barred else 0,
            stop_ids=stop_ids if barred else (),
        )

    def usage(self) -> Usage:
        return Usage(self.prompt_len, self.cached_tokens or 0, len(self.ids) - self.prompt_len)

    def timings(self, now: float) -> Timings:
        computed_us = tuple([ns // 1000 for ns in self.stage_ns])
        return self.clock.timings(now, self.preemptions, self.recomputed_tokens, computed_us)

    def check(self) -> None:
        size = self.hasher.block_size_tokens
        assert self.num_committed * size <= self.num_proven <= self.num_computed <= len(self.ids) + 1
        assert self.num_proven < len(self.ids) or not self.num_proven, "a token that nobody told was proven"
        assert self.num_computed <= len(self.blocks) * size
        assert self.num_sent_blocks <= len(self.blocks)
        assert not self.borrowed or (self.fresh and self.blocks and not self.num_sent_blocks)
        assert self.num_committed <= len(self.hashes) or self.num_committed == 0
        assert (self.slot is not None) == (self.status is Status.RUNNING)
        assert self.status is not Status.WAITING or not self.blocks
        assert self.watch.length == len(self.ids) - self.prompt_len
        if self.prompt is not None:
            self.prompt.check(self.num_proven)
