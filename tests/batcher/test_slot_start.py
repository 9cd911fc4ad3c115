"""What a fresh row tells the worker of its sampling: nothing more than that needs, and never too much."""

from dataclasses import replace

import pytest

from batcher import composer
from batcher.admission import Admission
from batcher.balance import Balance
from batcher.block_hash import BlockHasher, Extras
from batcher.chunks import ChunkRules
from batcher.events import StepPlan, StepReturned, TokensMade
from batcher.lease import Lease
from batcher.pace import Pace
from batcher.queueing import Queueing
from batcher.ring import step_header
from batcher.running import Running
from batcher.sequence import Clock, Phase, Sequence
from batcher.spare_room import SpareRoom
from chassis.ids import BlockId, Epoch, RequestId
from chassis.messages.pipeline import SlotStart
from chassis.messages.request import Limits, Reason, Request, Sampling
from chassis.messages.sampling import ALLOWED_IDS_LEN_MAX, LOGIT_BIAS_LEN_MAX, Shaping, TokenLogprobs
from chassis.transport.interface import HEADER_BYTES_MAX
from tests.batcher.test_scheduler import plan_rows_once, world
from tests.batcher.toy_pipeline import EOS, STOPS, make_request

PENALTY = Shaping(presence_penalty=0.5)


def sequence(request: Request, output_ids: tuple[int, ...] = ()) -> Sequence:
    watch = STOPS.watch(request.limits, len(request.prompt_ids), 100)
    for token_id in output_ids:
        watch.push(token_id)
    hasher = BlockHasher(b"n", 4, Extras())
    return Sequence(request, output_ids, watch, hasher, Clock(0.0, 0.0, Phase.WAITING), (5, 0))


def asked(limits: Limits, shaping: Shaping | None = None) -> Request:
    return replace(make_request("r", [1, 2, 3], limits), sampling=Sampling(0.5, shaping=shaping))


def test_a_plain_row_says_three_numbers_and_a_seed() -> None:
    request = asked(Limits(9))
    assert sequence(request, (7,)).slot_start(2) == SlotStart(request.sampling, 1)


def test_penalties_take_along_what_the_steps_do_not_bring() -> None:
    start = sequence(asked(Limits(9), PENALTY), (7, 8)).slot_start(4)
    assert (start.prompt_len, start.before) == (3, (1, 2, 3, 7))
    assert (start.min_tokens, start.stop_ids) == (0, ())
    assert sequence(asked(Limits(9), PENALTY)).slot_start(0).before == ()


def test_what_needs_no_history_takes_none_along() -> None:
    start = sequence(asked(Limits(9), Shaping(min_p=0.1, bad_words=((4,),))), (7, 8)).slot_start(4)
    assert (start.prompt_len, start.before) == (0, ())


def test_ends_are_barred_only_while_the_output_is_too_short() -> None:
    limits = Limits(9, min_tokens=2, stop_token_ids=(5, 4))
    assert sequence(asked(limits), (7,)).slot_start(0).stop_ids == (4, 5, EOS)
    assert sequence(asked(limits), (7,)).slot_start(0).min_tokens == 2
    assert sequence(asked(replace(limits, ignore_eos=True))).slot_start(0).stop_ids == (4, 5)
    assert sequence(asked(limits), (7, 8)).slot_start(0).min_tokens == 0
    assert sequence(asked(Limits(9, min_tokens=2, ignore_eos=True))).slot_start(0).min_tokens == 0


def test_histories_of_one_step_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the pipeline formed anew all rows are fresh; who does not fit goes with a later step."""
    monkeypatch.setattr(composer, "HISTORY_TOKENS_MAX", 26)  # each has 3 blocks, too
    made = world()
    for i in range(5):
        request = make_request(f"r{i}", [i] * 9, Limits(30, ignore_eos=True))
        made.add(replace(request, sampling=Sampling(shaping=PENALTY if i else None)))
    while len(made.outputs) < 5 or made.calls:
        plan_rows_once(made)
    made.lose()
    made.form(pool_changed=False)
    histories: list[list[int]] = []
    begun: set[RequestId] = set()
    while len(begun) < 5:
        if not made.plan():
            plan_rows_once(made)
            continue
        fresh = [row for row in made.ring[-1].rows if row.fresh]
        begun |= {row.request_id for row in fresh}
        starts = [made.scheduler.slot_start(row.request_id, row.start) for row in fresh]
        assert all(len(start.before) in (0, row.start) for start, row in zip(starts, fresh, strict=True))
        histories.append([len(start.before) for start in starts if start.before])
    assert [step for step in histories if step] == [[8, 8], [8, 8]]
    made.finish(2000)
    assert all(made.ended[RequestId(f"r{i}")].reason is Reason.LENGTH for i in range(5))


def test_lists_of_ids_count_as_histories_do() -> None:
    """A frame holds the lists of some hundred requests, not of thousands."""
    lists = Shaping(logit_bias=((1, 0.5),), allowed_ids=(1, 2, 3), bad_words=((4,), (5, 6)))
    assert sequence(asked(Limits(9), lists)).num_told == 2 + 3 + 3
    assert sequence(asked(Limits(9))).num_told == 0


def test_log_probabilities_find_their_request() -> None:
    made = world()
    for name, last in (("a", 3), ("b", 4)):  # of one prompt one would wait for the other
        made.add(make_request(name, [1, 2, last], Limits(5, ignore_eos=True)))
    while not any(row.samples for plan in made.ring for row in plan.rows):
        plan_rows_once(made)
    plan = made.ring[0]
    assert [row.request_id for row in plan.rows if row.samples] == ["a", "b"]
    made.stop(RequestId("a"))  # its row counts no longer
    told = ((0, TokenLogprobs(-1.0, 1)), (1, TokenLogprobs(-2.0, 2, (7,), (-1.5,))))
    assert made.scheduler.returned(StepReturned(made.now, plan.epoch, plan.number, (4, 5), told))
    notes = [note for note in made.scheduler.take().notes if isinstance(note, TokensMade)]
    assert [(note.request_ids, note.ids, note.logprobs) for note in notes] == [
        (("b",), ((5,),), (("b", told[1][1]),))
    ]


def test_steps_of_long_fresh_rows_fit_into_a_frame() -> None:
    """64 sequences of 100,000 tokens whose sampling follows them, after the pipeline formed anew: with the
    longest lists, and tables of the smallest blocks that somebody would choose."""
    size, length = 4, 100_000
    shaping = Shaping(
        repetition_penalty=1.5,
        logit_bias=tuple((2**31 + i, 1.0) for i in range(LOGIT_BIAS_LEN_MAX)),
        allowed_ids=tuple(2**31 + i for i in range(ALLOWED_IDS_LEN_MAX)),
    )
    running, lease = Running(64), Lease(16, 64)
    running.runs_ahead = False
    balance = Balance(ChunkRules(512, size), steps_in_flight=2, run_ahead=False)
    balance.open(1)
    made = composer.Composer(
        balance,
        running,
        Admission(lease, Queueing(), size, 64, 8, 0.25, False),
        lease,
        never,
        size,
        512,
        64,
        SpareRoom(float, Pace()),
    )
    made.open(1)
    prompt, by_id = (2**31,) * length, {}
    for i in range(64):
        request = replace(make_request(f"r{i}", [1], Limits(9)), prompt_ids=prompt)
        sequence_ = sequence(replace(request, sampling=Sampling(shaping=shaping)))
        sequence_.blocks = list(map(BlockId, range(length // size)))
        sequence_.num_computed = sequence_.num_proven = length - 1
        by_id[request.id] = sequence_
        running.seat(sequence_)
    sizes, sent, number = [], 0, 1
    while sent < 64:
        rows, _ = made.compose(0, 0, 0.0)
        assert rows, "somebody never fits"
        plan = StepPlan(Epoch(1), number, rows)
        sizes.append(len(step_header(plan, lambda name, start: by_id[name].slot_start(start), b"")))
        sent, number = sent + len(rows), number + 1
    assert max(sizes) < HEADER_BYTES_MAX // 2 and len(sizes) > 5


def never(sequence_: Sequence, now: float) -> None:
    raise AssertionError("nobody has to give way")
