"""Pure. What a step brought back: tokens for their sequences, full blocks for kvstore, ends.

A row whose sequence is over, or has begun anew, is a ghost: nothing of it is taken. One whose blocks do not
hold what they should makes its sequence begin anew; one that nothing was drawn for yet is computed again.
What stages computed is shared out over the rows by their tokens; the shares of ghosts are nobody's.
"""

from collections.abc import Iterable

from batcher.block_hash import NO_PARENT
from batcher.composer import FlightRow, counts
from batcher.events import StepReturned, TokensMade
from batcher.lease import Lease
from batcher.roster import Roster
from batcher.running import Running
from batcher.sequence import Phase, Sequence
from batcher.stops import End
from chassis.ids import RequestId
from chassis.messages.pipeline import StageTiming
from chassis.messages.request import Reason
from chassis.messages.sampling import TokenLogprobs


class Harvest:
    def __init__(
        self, roster: Roster, running: Running, lease: Lease, block_size_tokens: int, prefix_cache: bool
    ) -> None:
        self._roster = roster
        self._running = running
        self._lease = lease
        self._block_size_tokens = block_size_tokens
        self._prefix_cache = prefix_cache

    def gather(self, rows: tuple[FlightRow, ...], event: StepReturned) -> int:
        """`rows`: what the step that came back carried. Returns how many of them were ghosts."""
        now, size, running = event.now, self._block_size_tokens, self._running
        for sequence, incarnation, start, _, _ in [rows[place] for place in event.void_rows]:
            if sequence.incarnation == incarnation:
                self._roster.distrust(sequence, start, now)
        request_ids: list[RequestId] = []
        made: list[tuple[int, ...]] = []
        ended: list[tuple[Sequence, End]] = []
        num_ghosts = 0
        failed = self._failed(rows, event) if event.nan_places or event.prompts or event.refusals else {}
        waiting = _waiting(rows, event) if event.waiting_places else {}
        token_ids = iter(event.token_ids)
        token_ns = _token_ns(rows, event.timings) if event.timings else ()
        for sequence, incarnation, start, end, samples in rows:
            token_id = next(token_ids) if samples else 0
            if sequence.incarnation != incarnation:
                num_ghosts += 1
                continue
            if token_ns:
                sequence.charge(end - start, token_ns)
            if waiting and sequence.request.id in waiting:
                self._roster.defer(sequence)
                continue
            sequence.num_proven = end
            written = sequence.num_written
            if end > written:
                sequence.num_written = end
            if start < written:
                sequence.recomputed_tokens += min(end, written) - start
            if end >= (sequence.num_committed + 1) * size:
                self.commit(sequence, end // size, now)
            if not samples or sequence.request.id in failed:
                continue
            sequence.ids.append(token_id)
            running.growth_tokens -= 1
            if sequence.clock.phase is not Phase.DECODE:
                sequence.clock.enter(Phase.DECODE, now)
            request_ids.append(sequence.request.id)
            made.append((token_id,))
            over = sequence.watch.push(token_id)
            if over is None:
                running.told(sequence)
            else:
                ended.append((sequence, over))
        roster = self._roster
        if made:
            told = _told(rows, event.logprobs) if event.logprobs else ()
            begun = roster.prompts.begun(request_ids)
            roster.notes.append(TokensMade(now, tuple(request_ids), tuple(made), told, begun))
        for sequence, found in ended:
            roster.end(sequence, found.reason, found.byte_cut, now)
        for request_id, error in failed.items():
            roster.end(roster[request_id], Reason.FAILED, None, now, error)
        roster.begin_siblings(now)
        return num_ghosts

    def _failed(self, rows: tuple[FlightRow, ...], event: StepReturned) -> dict[RequestId, str]:
        """Takes in what the step tells of prompts. Returns the requests that nothing can be drawn for, and
        why: they fail, and nobody else."""
        found = {}
        answered = self._roster.prompts.learn(
            [row[0] if counts(row) else None for row in rows], event.prompts
        )
        for request_id in answered:
            found[request_id] = "NaN logits: the model's numbers for its prompt are none"
        sampling = [row for row in rows if row[4]]
        for sequence, *_ in [sampling[place] for place in event.nan_places if counts(sampling[place])]:
            what = f"output token {sequence.watch.length}"
            found[sequence.request.id] = f"NaN logits: the model's numbers for {what} are none"
        for place, why in event.refusals:
            if counts(sampling[place]):
                found.setdefault(sampling[place][0].request.id, why)
        return found

    def commit(self, sequence: Sequence, num_blocks: int, now: float) -> None:
        """The first `num_blocks` of its table are full, and proven."""
        if not self._prefix_cache:
            return
        hashes = sequence.chain(num_blocks)
        for index in range(sequence.num_committed, num_blocks):
            parent = hashes[index - 1] if index else NO_PARENT
            later = index * self._block_size_tokens >= sequence.prompt_len
            self._lease.commit(sequence.blocks[index], hashes[index], parent, now, later)
        sequence.num_committed = num_blocks


def _token_ns(rows: tuple[FlightRow, ...], timings: tuple[StageTiming, ...]) -> tuple[int, ...]:
    """What one token of the step took at each stage."""
    num_tokens = sum([end - start for _, _, start, end, _ in rows])
    return tuple([timing.compute_ns // num_tokens for timing in timings]) if num_tokens else ()


def _waiting(rows: tuple[FlightRow, ...], event: StepReturned) -> dict[RequestId, None]:
    """Requests that nothing was drawn for yet: their grammar is compiled still."""
    sampling = [row for row in rows if row[4]]
    return {sampling[place][0].request.id: None for place in event.waiting_places}


def _told(
    rows: Iterable[FlightRow], logprobs: tuple[tuple[int, TokenLogprobs], ...]
) -> tuple[tuple[RequestId, TokenLogprobs], ...]:
    """Of the rows that still count, by request."""
    sampling = [row for row in rows if row[4]]
    return tuple(
        (sampling[place][0].request.id, entry)
        for place, entry in logprobs
        if sampling[place][0].incarnation == sampling[place][1]
    )
