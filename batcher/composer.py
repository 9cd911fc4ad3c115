"""Pure. Puts the rows of one step together: who catches up by how much, and into which blocks.

Decodes first, then what is sent ahead, then prompts, under the budgets of tokens and blocks. Where blocks
are missing they are asked for; when the pool is dry, room is made, but for nobody who is sent ahead: first
what waiting sequences hold, then whoever is last in the order.
A sequence that must share its steps with no one has the whole ring for itself, one step at a time.
"""

from collections.abc import Callable

from batcher import policy
from batcher.admission import Admission
from batcher.events import Row
from batcher.lease import Lease
from batcher.running import Running
from batcher.sequence import Sequence, Status
from chassis.messages.pipeline import LAST_SAMPLED

# Of one step, in ids of 4 or 5 bytes: what fresh rows bring along, their tables and what their sampling needs
# (lists, the ids before). One row may have more, alone. A link's frame takes three times as much.
HISTORY_TOKENS_MAX = 1 << 20
FlightRow = tuple[Sequence, int, int, int, bool]  # sequence, its incarnation, start, end, samples


def counts(row: FlightRow) -> bool:
    """False: a ghost. Its sequence has ended, lost its place, or begun anew."""
    return row[0].incarnation == row[1]


class Composer:
    def __init__(
        self,
        running: Running,
        admission: Admission,
        lease: Lease,
        preempt: Callable[[Sequence, float], None],
        block_size_tokens: int,
        step_tokens_max: int,
    ) -> None:
        assert step_tokens_max >= 1
        self._running = running
        self._admission = admission
        self._lease = lease
        self._preempt = preempt
        self._block_size_tokens = block_size_tokens
        self._step_tokens_max = step_tokens_max
        self._groups = 1
        self._decoding_max = 1
        self._steps_max = 1
        self._shared_left: int | None = 0  # shared steps until one alone; None: one alone is in flight
        self._preempted = False
        self._history_left = HISTORY_TOKENS_MAX
        self.decodes = False  # the last step composed has decodes
        self.num_ahead = 0  # rows of it that are sent ahead
        self._rows: list[Row] = []
        self._carried: list[FlightRow] = []

    def open(self, steps_max: int, num_stages: int) -> None:
        """A new epoch: nothing is in flight."""
        self._groups = policy.decode_groups(steps_max, num_stages)
        self._decoding_max = 2 if self._running.runs_ahead else self._groups
        self._steps_max = steps_max
        self._shared_left = 0

    def compose(
        self, num_in_flight: int, num_decoding: int, now: float
    ) -> tuple[tuple[Row, ...], tuple[FlightRow, ...]]:
        """Rows of the next step, and the record of what it carries. `num_decoding`: how many of the steps in
        flight have decodes."""
        self._rows, self._carried, self._preempted = [], [], False
        self.decodes, self.num_ahead = False, 0
        self._history_left = HISTORY_TOKENS_MAX
        self._fill(num_in_flight, num_decoding, now)
        if self._preempted:  # whoever lost its blocks is not in this step either
            kept = [
                (row, carried)
                for row, carried in zip(self._rows, self._carried, strict=True)
                if counts(carried)
            ]
            return tuple([row for row, _ in kept]), tuple([carried for _, carried in kept])
        return tuple(self._rows), tuple(self._carried)

    def _fill(self, num_in_flight: int, num_decoding: int, now: float) -> None:
        alone = self._running.alone
        if self._shared_left is None:
            if num_in_flight:
                return
            self._shared_left = self._steps_max
        if alone and self._shared_left == 0:
            if num_in_flight:
                return
            self._fill_alone(now)
            if self._rows:
                return
            self._shared_left = self._steps_max  # it lacks blocks: the others go on
        if num_decoding < self._decoding_max:
            self._fill_decodes(now)
        self._fill_prompts(now)
        if self._rows:
            self._shared_left = max(0, self._shared_left - 1)
        elif alone and not num_in_flight:
            self._fill_alone(now)

    def _fill_alone(self, now: float) -> None:
        line = self._running.alone
        for sequence in tuple(line):
            if self._add_row(sequence, self._step_tokens_max, now):
                line.remove(sequence)
                if sequence.num_computed < len(sequence.ids):
                    line.append(sequence)
                self._shared_left = None
                return

    def _fill_decodes(self, now: float) -> None:
        """Those whose token is known, then those that are sent ahead: for these nobody gives way."""
        line, ahead = self._running.decoding, tuple(self._running.ahead.values())
        num_decodes = len(self._running) - len(self._running.prefilling)
        rows_max = min(-(-num_decodes // self._groups), self._step_tokens_max)
        blocked: list[Sequence] = []
        size, rows = self._block_size_tokens, self._rows
        while line and len(rows) < rows_max:
            sequence = line.popleft()
            start = sequence.num_computed
            if start >= len(sequence.blocks) * size and not self._grow(sequence, start + 1, now):
                blocked.append(sequence)
                continue
            if sequence.fresh and not self._carries_history(sequence):
                blocked.append(sequence)
                continue
            self._append_decode(sequence, sequence.ids[start])
        if blocked:
            line.extendleft(s for s in reversed(blocked) if s.status is Status.RUNNING)
        for sequence in ahead:
            if len(rows) >= rows_max:
                break
            if sequence.request.id not in self._running.ahead:  # it gave way
                continue
            if sequence.num_computed >= len(sequence.blocks) * size and not self._grow_idle(sequence):
                continue
            del self._running.ahead[sequence.request.id]
            self._append_decode(sequence, LAST_SAMPLED)
            self.num_ahead += 1
        self.decodes = bool(rows)

    def _append_decode(self, sequence: Sequence, token_id: int) -> None:
        start, blocks = sequence.num_computed, sequence.blocks
        end, num_blocks = start + 1, len(blocks)
        sent = 0 if sequence.fresh else sequence.num_sent_blocks
        assert sequence.slot is not None
        self._rows.append(
            Row(
                sequence.request.id,
                sequence.slot,
                start,
                (token_id,),
                True,
                end - sequence.prompt_len,
                tuple(blocks[sent:]) if sent < num_blocks else (),
                sequence.fresh,
            )
        )
        self._carried.append((sequence, sequence.incarnation, start, end, True))
        sequence.fresh = False
        sequence.num_sent_blocks = num_blocks
        sequence.num_computed = end
        self._running.line_up(sequence)

    def _fill_prompts(self, now: float) -> None:
        line = self._running.prefilling
        left = policy.prefill_tokens_max(self._step_tokens_max, len(self._rows))
        for sequence in tuple(line.values()):
            if left <= 0:
                return
            if sequence.request.id in line:  # not preempted meanwhile
                left -= self._add_row(sequence, left, now)
                if len(sequence.ids) - sequence.num_computed <= 1:
                    del line[sequence.request.id]
                    self._running.line_up(sequence)

    def _add_row(self, sequence: Sequence, tokens_max: int, now: float) -> int:
        """Let it catch up by as many tokens as budget and blocks allow; returns how many."""
        start = sequence.num_computed
        end = min(len(sequence.ids), start + tokens_max)
        if end > len(sequence.blocks) * self._block_size_tokens:
            self._grow(sequence, end, now)
            end = min(end, len(sequence.blocks) * self._block_size_tokens)
        if end <= start or (sequence.fresh and not self._carries_history(sequence)):
            return 0
        self._append(sequence, start, end)
        return end - start

    def _carries_history(self, sequence: Sequence) -> bool:
        """Whether what a fresh row brings along still fits into this step."""
        told = sequence.num_told + len(sequence.blocks)
        if self._history_left < told and self._history_left < HISTORY_TOKENS_MAX:
            return False
        self._history_left -= told
        return True

    def _append(self, sequence: Sequence, start: int, end: int) -> None:
        num_tokens, blocks = len(sequence.ids), sequence.blocks
        sent = 0 if sequence.fresh else sequence.num_sent_blocks
        samples = end == num_tokens
        assert sequence.slot is not None
        self._rows.append(
            Row(
                sequence.request.id,
                sequence.slot,
                start,
                tuple(sequence.ids[start:end]),
                samples,
                num_tokens - sequence.prompt_len,
                tuple(blocks[sent:]) if sent < len(blocks) else (),
                sequence.fresh,
            )
        )
        self._carried.append((sequence, sequence.incarnation, start, end, samples))
        sequence.fresh = False
        sequence.num_sent_blocks = len(blocks)
        sequence.num_computed = end

    def _grow(self, sequence: Sequence, end: int, now: float) -> bool:
        """Append blocks until `end` tokens fit. False: there are not enough now; they are asked for."""
        lease, blocks, size = self._lease, sequence.blocks, self._block_size_tokens
        want = -(-end // size)
        blocks.extend(lease.take(want - len(blocks)))
        while len(blocks) < want and lease.dry and self._make_room(sequence, now):
            blocks.extend(lease.take(want - len(blocks)))
        if len(blocks) < want:
            lease.lack(-(-len(sequence.ids) // size) - len(blocks))
        return len(blocks) >= want

    def _grow_idle(self, sequence: Sequence) -> bool:
        """One more block for a token that may never come: of those that nobody needs."""
        if not self._lease.num_idle:
            self._lease.lack(1)
            return False
        sequence.blocks.extend(self._lease.take(1))
        return True

    def _make_room(self, sequence: Sequence, now: float) -> bool:
        """The pool is dry. False: nobody gives way, it must wait."""
        if self._admission.let_go(now):
            return True
        victim = policy.choose_victim(self._running, sequence)
        if victim is not None:
            self._preempted = True
            self._preempt(victim, now)
            return True
        if len(self._running) == 1:
            self._lease.doubt(now)  # on its own it must fit
        return False

    def check(self) -> None:
        assert self._groups >= 1
        assert self._shared_left is None or 0 <= self._shared_left <= self._steps_max
