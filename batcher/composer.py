"""Pure. Puts the rows of one step together: who catches up by how much, and into which blocks.

Decodes first, divided evenly among the steps that may have them (`spread`), then what is sent ahead, then
prompts, under the budgets of tokens, time (`chunks`), rows and blocks; at last the batch class, in the room
that is spare (`spare_room`). Where blocks are missing they are asked for; when the pool is dry, room is made,
but for nobody who is sent ahead: first what waiting sequences hold, then whoever is last in the order.
A sequence that must share its steps with no one has the whole ring for itself, one step at a time.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from batcher.admission import Admission
from batcher.balance import Balance
from batcher.block_copies import BlockCopies
from batcher.chunks import Budget, Scene
from batcher.events import Row
from batcher.lease import Lease
from batcher.running import Lines, Running
from batcher.sequence import Sequence, Status
from batcher.spare_room import SpareRoom
from batcher.stage_cost import Load
from batcher.victims import choose_victim
from chassis.messages.pipeline import LAST_SAMPLED

# Of one step, in ids of 4 or 5 bytes: what fresh rows bring along, their tables and what their sampling needs
# (lists, the ids before). One row may have more, alone. A link's frame takes three times as much.
HISTORY_TOKENS_MAX = 1 << 20
FlightRow = tuple[Sequence, int, int, int, bool]  # sequence, its incarnation, start, end, samples


def counts(row: FlightRow) -> bool:
    """False: a ghost. Its sequence has ended, lost its place, or begun anew."""
    return row[0].incarnation == row[1]


def load_of(rows: SequenceOf[tuple[Any, int, int, int, bool]]) -> Load:
    """What a step with these rows, as in `FlightRow`, computes."""
    chunks = [(row[2], row[3] - row[2]) for row in rows if row[3] - row[2] > 1]
    return Load(
        sum([tokens for _, tokens in chunks]),
        len(rows) - len(chunks),
        sum([tokens * start + tokens * (tokens + 1) // 2 for start, tokens in chunks]),
        sum([row[3] for row in rows]),
    )


def _whole(prompts: Iterable[Sequence]) -> Load:
    """What it takes to compute them, the prefixes left out that were found computed."""
    ends = [(sequence.cached_tokens or 0, len(sequence.ids)) for sequence in prompts]
    return Load(
        sum([end - start for start, end in ends]),
        0,
        sum([(end - start) * (start + end + 1) // 2 for start, end in ends]),
        sum([end for _, end in ends]),
    )


class Composer:
    def __init__(
        self,
        balance: Balance,
        running: Running,
        admission: Admission,
        lease: Lease,
        preempt: Callable[[Sequence, float], None],
        block_size_tokens: int,
        step_tokens_max: int,
        rows_max: int,
        spare_room: SpareRoom,
    ) -> None:
        assert step_tokens_max >= 1 and rows_max >= 1
        self._stage_cost = balance.cost
        self._spread = balance.spread
        self._chunks = balance.chunks
        self._running = running
        self._admission = admission
        self._lease = lease
        self._preempt = preempt
        self._block_size_tokens = block_size_tokens
        self._step_tokens_max = step_tokens_max
        self._rows_max = rows_max
        self._spare_room = spare_room
        self._num_stages = 1
        self._shared_left: int | None = 0  # shared steps until one alone; None: one alone is in flight
        self._preempted = False
        self._history_left = HISTORY_TOKENS_MAX
        self.decodes = False  # the last step composed has decodes
        self.num_ahead = 0  # rows of it that are sent ahead
        self.context = 0.0  # positions of a decode, in the last step that had some
        self._rows: list[Row] = []
        self._carried: list[FlightRow] = []
        self.copies = BlockCopies(lease, block_size_tokens)

    def open(self, num_stages: int) -> None:
        """A new epoch: nothing is in flight."""
        self._num_stages = num_stages
        self._shared_left = 0

    @property
    def num_decoding(self) -> int:
        """Sequences that decode, in whichever step, the batch class left out."""
        running = self._running
        waiting = len(running.siblings) - running.siblings.num_batch
        return len(running) - len(running.batch) - len(running.lines.prefilling) - waiting

    @property
    def places(self) -> int:
        """Steps that may be in flight now."""
        return self._spread.places(self.num_decoding)

    @property
    def num_batch_decoding(self) -> int:
        running = self._running
        return len(running.batch) - len(running.spare.prefilling) - running.siblings.num_batch

    def compose(
        self, num_in_flight: int, num_decoding: int, now: float
    ) -> tuple[tuple[Row, ...], tuple[FlightRow, ...]]:
        """Rows of the next step, and the record of what it carries. `num_decoding`: how many of the steps in
        flight have decodes."""
        self._rows, self._carried, self._preempted = [], [], False
        self.copies.begin()
        self.decodes, self.num_ahead = False, 0
        self._history_left = HISTORY_TOKENS_MAX
        decoding = self.num_decoding or self.num_batch_decoding
        self._spread.look(self._stage_cost.stages, decoding, self.context)
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
            self._shared_left = self._spread.places_max
        if alone and self._shared_left == 0:
            if num_in_flight:
                return
            self._fill_alone(now)
            if self._rows:
                return
            self._shared_left = self._spread.places_max  # it lacks blocks: the others go on
        decoding_max = 2 if self._spread.runs_ahead else self._spread.groups
        if num_decoding < decoding_max:
            self._fill_decodes(decoding_max - num_decoding, now)
        scene = self._scene(num_in_flight)
        if self.decodes:
            self._chunks.decodes_go(scene)
        if self._running.lines.prefilling:
            budget = self._chunks.budget(scene)
            self._fill_prompts(self._running.lines, budget, now)
            self._chunks.sent(scene, budget)
        if self._running.batch:
            self._fill_spare(num_in_flight, now)
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

    def _fill_decodes(self, steps_left: int, now: float) -> None:
        """Those whose token is known, then those that are sent ahead: for these nobody gives way.
        `steps_left`: that may still have decodes, this one included."""
        running, ahead = self._running, tuple(self._running.ahead.values())
        rows_max = -(-self.num_decoding // self._spread.groups)
        if not self._spread.runs_ahead:
            rows_max = min(rows_max, -(-len(running.lines.decoding) // steps_left))
        rows_max = min(rows_max, self._step_tokens_max, self._rows_max)
        self._fill_known(running.lines, rows_max, now)
        size, rows = self._block_size_tokens, self._rows
        for sequence in ahead:
            if len(rows) >= rows_max:
                break
            if sequence.request.id not in running.ahead:  # it gave way
                continue
            if sequence.num_computed >= len(sequence.blocks) * size and not self._grow_idle(sequence):
                continue
            del running.ahead[sequence.request.id]
            self._append_decode(sequence, LAST_SAMPLED)
            self.num_ahead += 1
        self.decodes = bool(rows)
        if rows:
            self.context = sum([row.start for row in rows]) / len(rows) + 1

    def _fill_known(self, lines: Lines, rows_max: int, now: float) -> None:
        """Decodes of tokens that are known, until the step has so many rows."""
        line, rows, size = lines.decoding, self._rows, self._block_size_tokens
        blocked: list[Sequence] = []
        while line and len(rows) < rows_max:
            sequence = line.popleft()
            start = sequence.num_computed
            if start >= len(sequence.blocks) * size and not self._grow(sequence, start + 1, now):
                blocked.append(sequence)
                continue
            if sequence.borrowed and not self._own_last(sequence, now):
                blocked.append(sequence)
                continue
            if sequence.fresh and not self._carries_history(sequence):
                blocked.append(sequence)
                continue
            self._append_decode(sequence, sequence.ids[start])
        if blocked:
            line.extendleft(s for s in reversed(blocked) if s.status is Status.RUNNING)

    def _fill_spare(self, num_in_flight: int, now: float) -> None:
        """The batch class: beside others, or in a step of its own while no other runs."""
        running, rows = self._running, self._rows
        used = sum(len(row.token_ids) for row in rows)
        if rows:
            left = self._spare_room.beside(used, len(rows))
        elif len(running) > len(running.batch) or num_in_flight >= self._num_stages:
            return
        else:
            left = self._spare_room.alone()
        left = min(left, self._step_tokens_max - used)
        before = len(rows)
        decodes = -(-self.num_batch_decoding // self._spread.groups)
        self._fill_known(running.spare, min(before + min(left, decodes), self._rows_max), now)
        if not before and rows:
            self.context = sum([row.start for row in rows]) / len(rows) + 1
        self._fill_prompts(running.spare, Budget.of_tokens(left - (len(rows) - before)), now)

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

    def _fill_prompts(self, lines: Lines, budget: Budget, now: float) -> None:
        line = lines.prefilling
        for sequence in tuple(line.values()):
            if sequence.request.id not in line:  # preempted meanwhile
                continue
            start = sequence.num_computed
            tokens = budget.chunk(start, len(sequence.ids) - start)
            if tokens <= 0 or len(self._rows) >= self._rows_max:
                return
            added = self._add_row(sequence, tokens, now)
            if added:
                budget.spend(start, added)
            if len(sequence.ids) - sequence.num_computed <= 1:
                del line[sequence.request.id]
                self._running.line_up(sequence)

    def _scene(self, num_in_flight: int) -> Scene:
        running, size = self._running, self._block_size_tokens
        prompts = running.lines.prefilling.values()
        first = next(iter(prompts), None)
        group = -(-self.num_decoding // self._spread.groups)
        lacking = sum([-(-len(sequence.ids) // size) - len(sequence.blocks) for sequence in prompts])
        spare = self._lease.available - self.num_decoding
        return Scene(
            decodes=load_of(self._carried),
            groups=self._spread.groups,
            group=Load(0, group, 0, round(group * self.context)),
            decoding=self.num_decoding if self._rows or num_in_flight else 0,  # else none waits for this step
            prompts=len(prompts) + min(running.places, len(self._admission.waiting)),
            whole=_whole(prompts),
            begins=first is not None and first.fresh,
            start=0 if first is None else first.num_computed,
            left=0 if first is None else len(first.ids) - first.num_computed,
            blocks_share=1.0 if spare >= lacking or lacking <= 0 else max(0.0, spare / lacking),
        )

    def _add_row(self, sequence: Sequence, tokens_max: int, now: float) -> int:
        """Let it catch up by as many tokens as budget and blocks allow; returns how many."""
        start = sequence.num_computed
        end = min(len(sequence.ids), start + tokens_max)
        if sequence.borrowed and not self._own_last(sequence, now):
            return 0
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

    def _own_last(self, sequence: Sequence, now: float) -> bool:
        """A copy takes the place of the block that it borrowed. False: there is no room for one."""
        lease = self._lease
        own = lease.take(1)
        while not own and lease.dry and self._make_room(sequence, now):
            own = lease.take(1)
        if own:
            self.copies.replace_last(sequence, own[0])
        else:
            lease.lack(1)
        return bool(own)

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
        soon = len(self._running)  # a block for each
        victim = choose_victim(self._running, sequence, self._lease.refs.num_own, soon)
        if victim is not None:
            self._preempted = True
            self._preempt(victim, now)
            return True
        if all(other is sequence or not other.blocks for other in self._running):
            self._lease.doubt(now)  # on its own it must fit
        return False

    def check(self) -> None:
        assert self._shared_left is None or 0 <= self._shared_left <= self._spread.places_max
