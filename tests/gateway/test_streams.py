"""Table 2.2 of the ownership protocol, one test per row, then what the rows do together."""

from dataclasses import replace

import pytest

from chassis.errors import Code
from chassis.ids import Attempt, BootId, GatewayId, RequestId
from chassis.messages.chunk import Chunk, Finish, Part, extend_digest
from chassis.messages.ownership import (
    Attach,
    AttachKind,
    CancelAsk,
    Detached,
    Refused,
    TakeoverAnswer,
    TakeoverQuestion,
)
from chassis.messages.request import (
    Cancel,
    Claim,
    Limits,
    Reason,
    Record,
    Request,
    Sampling,
    Terminal,
)
from chassis.messages.sampling import PromptTold, TokenLogprobs
from gateway.cancels import LEN_MAX
from gateway.events import (
    Accept,
    AskOwner,
    AttachAnswered,
    CancelHeard,
    CancelWanted,
    CancelWritten,
    ChunkArrived,
    ClientGone,
    Count,
    Effect,
    End,
    Event,
    Fail,
    LetGo,
    MessageRead,
    Pass,
    Publish,
    Published,
    PublishRequest,
    ReadMessage,
    ReadRecord,
    RecordRead,
    Resume,
    Submit,
    TakeoverAsked,
    Tell,
    Tick,
    Write,
    WriteCancel,
)
from gateway.streams import StreamLimits, Streams

G = GatewayId("g1")
A, B = BootId("a"), BootId("b")
R = RequestId("r1")
DIGEST = b"d" * 32
PLAIN = Request(
    id=R,
    tenant="t",
    gateway=G,
    model="m",
    prompt_ids=(1, 2),
    seed=7,
    sampling=Sampling(),
    limits=Limits(max_tokens=100),
    body_digest=DIGEST,
)
KEYED = replace(PLAIN, keyed=True)
LASTING = replace(PLAIN, resume_window_ms=60_000)


class Desk:
    """A core, a clock that is set by hand, and the effects of the last event."""

    def __init__(self, limits: StreamLimits | None = None) -> None:
        self.core = Streams(G, limits)
        self.now = 100.0
        self.out: list[Effect] = []
        self.seen: list[Effect] = []
        self.numbers: dict[BootId, int] = {}

    def do(self, event: Event) -> list[Effect]:
        self.out = self.core.handle(event)
        self.seen += self.out
        self.core.check()
        timer = self.core.next_timer()
        assert timer is None or not isinstance(event, Tick) or timer > self.now, "would spin"
        return self.out

    def one(self, kind: type[Effect]) -> Effect:
        found = [e for e in self.out if isinstance(e, kind)]
        assert len(found) == 1, self.out
        return found[0]

    def said(self) -> list[Effect]:
        """Effects that are not counts."""
        return [e for e in self.out if not isinstance(e, Count)]

    def wait(self, seconds: float) -> list[Effect]:
        """Ticks as the shell would, until `seconds` have passed; returns all that happened."""
        end, seen = self.now + seconds, []
        while (timer := self.core.next_timer()) is not None and timer <= end:
            self.now = max(self.now, timer)
            seen += self.do(Tick(self.now))
        self.now = end
        self.out = seen
        return seen

    # the ways in
    def submit(self, request: Request = PLAIN, client: int = 1) -> int:
        self.do(Submit(self.now, client, request))
        publish = self.one(PublishRequest)
        assert isinstance(publish, PublishRequest) and publish.request is request
        return publish.call

    def published(self, call: int, outcome: Publish = Publish.STORED) -> list[Effect]:
        return self.do(Published(self.now, R, call, outcome))

    def resume(self, ids: tuple[int, ...] = (), tenant: str = "t", client: int = 2) -> list[Effect]:
        return self.do(Resume(self.now, client, R, tenant, ids))

    def read(self, record: Record | None, seq: int = 1, failed: bool = False) -> list[Effect]:
        """Answers the newest ReadRecord."""
        call = next(e.call for e in reversed(self.seen) if isinstance(e, ReadRecord))
        return self.do(RecordRead(self.now, R, call, record, seq if record else 0, failed))

    def message(self, request: Request | None, vocab_size: int | None = 1000) -> list[Effect]:
        call = next(e.call for e in reversed(self.seen) if isinstance(e, ReadMessage))
        return self.do(MessageRead(self.now, R, call, request, 0.5, vocab_size))

    def answer(self, kind: AttachKind | None) -> list[Effect]:
        call = next(e.call for e in reversed(self.seen) if isinstance(e, AskOwner))
        return self.do(AttachAnswered(self.now, R, call, kind))

    def wrote(self, outcome: Write) -> list[Effect]:
        call = next(e.call for e in reversed(self.seen) if isinstance(e, WriteCancel))
        return self.do(CancelWritten(self.now, R, call, outcome))

    def opened(self, request: Request = PLAIN) -> "Desk":
        self.published(self.submit(request))
        if request.keyed:
            self.read(None)
        return self

    # the batcher's words
    def chunk(self, boot: BootId, *parts: Part, finishes: tuple[Finish, ...] = ()) -> list[Effect]:
        number = self.numbers[boot] = self.numbers.get(boot, 0) + 1
        return self.do(ChunkArrived(self.now, Chunk(boot, number, parts, finishes)))

    def takeover(self, attempt: int, boot: BootId) -> list[Effect]:
        return self.do(TakeoverAsked(self.now, TakeoverQuestion(R, Attempt(attempt), boot)))


def part(attempt: int, text: tuple[int, ...], first_index: int = 0, request_id: RequestId = R) -> Part:
    """`text` is the owner's whole output; the part carries it from `first_index` on."""
    return Part(request_id, Attempt(attempt), first_index, text[first_index:], extend_digest(0, text))


def finish(attempt: int, text: tuple[int, ...], reason: Reason = Reason.STOP) -> Finish:
    return Finish(R, Attempt(attempt), len(text), extend_digest(0, text), reason)


def claim(attempt: int, boot: BootId, digest: bytes = DIGEST) -> Claim:
    return Claim(Attempt(attempt), boot, digest)


def terminal(text: tuple[int, ...], reason: Reason = Reason.STOP, tenant: str = "t") -> Terminal:
    return Terminal(Attempt(1), A, reason, text, tenant=tenant, body_digest=DIGEST, model="m")


ACCEPTED = Accept(1, R, "m", (), (), PLAIN)


# ---- PUBLISHING ------------------------------------------------------------------------------------


def test_stored_without_key_is_open() -> None:
    desk = Desk()
    assert desk.published(desk.submit()) == [ACCEPTED]
    assert desk.chunk(A, part(1, (5,))) == [Pass(1, 0, (5,))]


def test_part_proves_a_publish_without_key() -> None:
    desk = Desk()
    call = desk.submit()
    assert desk.chunk(A, part(1, (5,))) == [ACCEPTED, Pass(1, 0, (5,))]
    assert desk.published(call, Publish.TIMEOUT) == [], "it is known to be stored"


def test_takeover_question_proves_a_publish_without_key() -> None:
    desk = Desk()
    desk.submit()
    answer = TakeoverAnswer(R, G, Attempt(1), (), None)
    assert desk.takeover(1, A) == [ACCEPTED, Tell(A, "", answer)]


@pytest.mark.parametrize("outcome", [Publish.STORED, Publish.DUPLICATE, Publish.TAKEN])
def test_keyed_publish_reads_before_it_opens(outcome: Publish) -> None:
    desk = Desk()
    desk.published(desk.submit(KEYED), outcome)
    assert isinstance(desk.one(ReadRecord), ReadRecord)
    desk.read(claim(3, A))
    assert desk.said()[0] == Accept(1, R, "m", (), (), KEYED)
    ask = desk.one(AskOwner)
    assert isinstance(ask, AskOwner) and (ask.boot, ask.attempt) == (A, 3)


def test_part_of_a_keyed_publish_reads_and_is_kept() -> None:
    desk = Desk()
    desk.submit(KEYED)
    desk.chunk(A, part(1, (5,)))
    desk.one(ReadRecord)
    desk.read(claim(1, A))
    assert Pass(1, 0, (5,)) in desk.out


def test_refused_publish_without_key_attaches() -> None:
    desk = Desk()
    desk.published(desk.submit(), Publish.TAKEN)
    desk.one(ReadRecord)


def test_full_stream_is_unavailable_with_a_hint() -> None:
    desk = Desk()
    desk.published(desk.submit(), Publish.FULL)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.UNAVAILABLE and fail.retry_ms
    assert len(desk.core) == 0 and desk.core.idle


def test_publish_that_did_not_happen_is_unavailable_and_writes_nothing() -> None:
    desk = Desk()
    assert [type(e) for e in desk.published(desk.submit(), Publish.REFUSED)] == [Fail]
    assert desk.core.idle


def test_timed_out_publish_with_key_writes_nothing() -> None:
    desk = Desk()
    assert [type(e) for e in desk.published(desk.submit(KEYED), Publish.TIMEOUT)] == [Fail]
    assert desk.core.idle


def test_timed_out_publish_without_key_writes_cancel() -> None:
    desk = Desk()
    desk.published(desk.submit(), Publish.TIMEOUT)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.UNAVAILABLE
    desk.read(None)
    assert desk.said() == [WriteCancel(R, 3, Cancel(Attempt(0), BootId(""), "unavailable"), 0)]
    desk.wrote(Write.STORED)
    assert desk.core.idle


def test_cancel_of_a_timed_out_publish_follows_the_claim_it_finds() -> None:
    desk = Desk()
    desk.published(desk.submit(), Publish.TIMEOUT)
    desk.read(claim(1, A), seq=9)
    write = desk.one(WriteCancel)
    assert isinstance(write, WriteCancel)
    assert (write.record.attempt, write.record.boot, write.expected_seq) == (1, A, 9)


# ---- Resume and ATTACHING --------------------------------------------------------------------------


def test_resume_listens_then_reads() -> None:
    desk = Desk()
    assert [type(e) for e in desk.resume((5,))] == [ReadRecord]
    assert desk.takeover(2, B) == [] == desk.chunk(B, part(2, (5, 6), 1)), "kept until the read is back"
    desk.read(claim(2, B))
    desk.message(PLAIN)
    yes = TakeoverAnswer(R, G, Attempt(2), (5,), None)
    assert Tell(B, "", yes) in desk.out and Pass(2, 1, (6,)) in desk.out


@pytest.mark.parametrize("record", [claim(3, A), Cancel(Attempt(3), A)])
def test_resume_takes_the_records_attempt_as_its_minimum(record: Claim | Cancel) -> None:
    desk = Desk()
    desk.resume((5,))
    desk.read(record)
    desk.message(PLAIN)
    assert desk.said() == [Accept(2, R, "m", (), (5,), PLAIN), AskOwner(R, 3, A, Attempt(3), (5,))]
    desk.chunk(B, part(2, (5, 6)))
    assert Tell(B, "", Refused(R, G, Attempt(2), minimum=Attempt(3))) in desk.out
    assert desk.takeover(3, B) == [Tell(B, "", TakeoverAnswer(R, G, Attempt(3), None, Attempt(3)))]


def test_resume_without_record_but_with_message_is_open() -> None:
    desk = Desk()
    desk.resume()
    desk.read(None)
    assert desk.message(PLAIN) == [Accept(2, R, "m", (), (), PLAIN)]
    assert desk.chunk(A, part(1, (5,))) == [Pass(2, 0, (5,))]


def test_resume_of_nothing_twice_is_not_found() -> None:
    desk = Desk()
    desk.resume()
    desk.read(None)
    desk.message(None)
    desk.wait(0.25)
    desk.read(None)
    desk.message(None)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.NOT_FOUND


def test_what_was_published_is_not_unknown_only_because_it_cannot_be_read() -> None:
    """The broker said that it has it; a reader that is behind must not make the client believe otherwise."""
    desk = Desk()
    desk.published(desk.submit(KEYED), Publish.TAKEN)
    desk.read(None)
    desk.message(None)
    desk.wait(0.25)
    desk.read(None)
    desk.message(None)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.UNAVAILABLE


def test_resume_finds_the_record_that_was_written_between_two_reads() -> None:
    desk = Desk()
    desk.resume((5,))
    desk.read(None)
    desk.message(None)
    desk.wait(0.25)
    desk.read(terminal((5, 6)))
    assert [type(e) for e in desk.out] == [Accept, Pass, End]


def test_resume_of_what_is_just_ending_waits_for_its_record() -> None:
    desk = Desk()
    desk.resume((5,))
    for _ in range(3):  # a stale claim, and the message acknowledged already
        desk.read(claim(1, A))
        assert desk.message(None) == []
        desk.wait(0.25)
    desk.read(terminal((5, 6)))
    assert [type(e) for e in desk.out] == [Accept, Pass, End]


def test_resume_of_another_tenant_is_not_found() -> None:
    for read in (lambda d: d.read(terminal((5,))), lambda d: (d.read(claim(1, A)), d.message(PLAIN))):
        desk = Desk()
        desk.resume(tenant="other")
        read(desk)
        fail = desk.one(Fail)
        assert isinstance(fail, Fail) and fail.code is Code.NOT_FOUND


def test_resume_of_another_tenant_does_not_disturb_the_stream_here() -> None:
    desk = Desk().opened()
    desk.resume(tenant="other")
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and (fail.client, fail.code) == (2, Code.NOT_FOUND)
    assert desk.chunk(A, part(1, (5,))) == [Pass(1, 0, (5,))]


def test_resume_with_ids_outside_the_vocabulary_is_refused() -> None:
    desk = Desk()
    desk.resume((5, 1000))
    desk.read(None)
    desk.message(PLAIN)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.INVALID_ARGUMENT and "output_ids" in fail.message


def test_newest_call_has_the_stream_and_keeps_its_minimum() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(4, (5, 6)))
    desk.resume((5,))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and (fail.client, fail.code) == (1, Code.ABORTED)
    desk.read(claim(3, B))  # a stale read
    desk.message(PLAIN)
    assert desk.takeover(3, B) == [Tell(B, "", TakeoverAnswer(R, G, Attempt(3), None, Attempt(4)))]
    assert desk.chunk(A, part(4, (5, 6), 1)) == [Pass(2, 1, (6,))]


def test_attaching_reads_again_after_a_failed_read_and_gives_up_in_time() -> None:
    desk = Desk()
    desk.resume()
    desk.read(None, failed=True)
    for _ in range(100):
        desk.wait(0.25)
        if any(isinstance(e, Fail) for e in desk.out):
            break
        desk.read(None, failed=True)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.UNAVAILABLE and 109 < desk.now < 112


@pytest.mark.parametrize("record", [claim(1, A, b"x" * 32), replace(terminal((5,)), body_digest=b"x" * 32)])
def test_same_key_with_another_body_is_refused_by_the_record(record: Claim | Terminal) -> None:
    desk = Desk()
    desk.published(desk.submit(KEYED), Publish.TAKEN)
    desk.read(record)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.ALREADY_EXISTS
    assert not any(isinstance(e, Accept) for e in desk.out)


def test_another_body_under_the_key_does_not_take_the_stream_of_who_was_first() -> None:
    desk = Desk().opened(KEYED)
    desk.do(Submit(desk.now, 2, replace(KEYED, body_digest=b"x" * 32)))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and (fail.client, fail.code) == (2, Code.ALREADY_EXISTS)
    desk.chunk(A, part(1, (5,)))
    passed = desk.one(Pass)
    assert isinstance(passed, Pass) and passed.client == 1


@pytest.mark.parametrize("reading", [False, True])
def test_while_the_first_ones_body_is_not_accepted_another_is_told_to_try_again(reading: bool) -> None:
    """The newcomer's may be the body that the record has, as that of one who was cut off."""
    desk = Desk()
    call = desk.submit(KEYED)
    if reading:
        desk.published(call, Publish.DUPLICATE)
    desk.do(Submit(desk.now, 2, replace(KEYED, body_digest=b"x" * 32)))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and (fail.client, fail.code) == (2, Code.UNAVAILABLE)


def test_who_resumes_keeps_its_stream_until_its_body_is_known() -> None:
    """The newcomer may ask for something else under the key; it is told to try again."""
    desk = Desk()
    desk.resume((5,))
    desk.do(Submit(desk.now, 3, KEYED))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and (fail.client, fail.code) == (3, Code.UNAVAILABLE)
    desk.read(terminal((5, 6)))
    assert [type(e) for e in desk.out] == [Accept, Pass, End]


@pytest.mark.parametrize("record", [claim(1, A, b"x" * 32), replace(terminal((5,)), body_digest=b"x" * 32)])
def test_an_open_stream_never_follows_another_body(record: Claim | Terminal) -> None:
    """Two were stored under one key and different subjects; the other one was claimed."""
    desk = Desk().opened(KEYED)
    desk.wait(11)
    desk.read(record)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.ALREADY_EXISTS
    assert not any(isinstance(e, AskOwner | Pass) for e in desk.seen)


def test_same_key_with_another_body_is_refused_by_the_message() -> None:
    desk = Desk()
    desk.published(desk.submit(KEYED), Publish.DUPLICATE)
    desk.read(None)
    desk.message(replace(KEYED, body_digest=b"x" * 32))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.ALREADY_EXISTS


# ---- OPEN: parts -----------------------------------------------------------------------------------


def test_part_below_the_minimum_is_told_old() -> None:
    desk = Desk().opened()
    desk.chunk(B, part(3, (5,)))
    for boot, attempt in ((A, 2), (A, 3)):  # lower, or equal of another boot
        desk.chunk(boot, part(attempt, (5, 6), 1))
        assert desk.said() == [Tell(boot, "", Refused(R, G, Attempt(attempt), minimum=Attempt(3)))]


def test_part_that_differs_is_dropped_told_and_raises() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    desk.chunk(B, part(2, (5, 9, 7), 2))
    assert desk.said() == [Tell(B, "", Refused(R, G, Attempt(2), differs=(5, 6)))]
    desk.chunk(A, part(1, (5, 6, 7), 2))
    assert desk.said() == [Tell(A, "", Refused(R, G, Attempt(1), minimum=Attempt(2)))]


@pytest.mark.parametrize(
    ("text", "first_index", "passed"),
    [
        ((5, 6, 7), 2, (7,)),  # exactly the next
        ((5, 6, 7), 0, (7,)),  # overlap
        ((5, 6), 0, ()),  # known
        ((5,), 0, ()),  # shorter than what is held
        ((5, 6), 2, ()),  # nothing
    ],
)
def test_part_that_continues_is_passed_on(
    text: tuple[int, ...], first_index: int, passed: tuple[int, ...]
) -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    desk.chunk(B, part(2, text, first_index))
    assert desk.said() == ([Pass(1, 2, passed)] if passed else [])
    assert Tell(A, "", Refused(R, G, Attempt(1), minimum=Attempt(2))) in desk.chunk(A, part(1, (5, 6, 7)))


@pytest.mark.parametrize("text", [(9,), (9, 6), (9, 6, 7)])
def test_overlap_with_another_text_differs(text: tuple[int, ...]) -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    desk.chunk(B, part(2, text, 0))
    assert desk.said() == [Tell(B, "", Refused(R, G, Attempt(2), differs=(5, 6)))]


def test_gap_only_raises_and_asks_for_what_is_missing() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(2, (5, 6, 7), 2))
    assert desk.said() == [AskOwner(R, 2, A, Attempt(2), ())]
    desk.answer(AttachKind.ATTACHED)
    assert desk.chunk(A, part(2, (5, 6, 7))) == [Pass(1, 0, (5, 6, 7))]
    assert Tell(B, "", Refused(R, G, Attempt(1), minimum=Attempt(2))) in desk.chunk(B, part(1, (5, 6, 7)))


# ---- OPEN: takeover questions ----------------------------------------------------------------------


def test_takeover_above_the_minimum_raises_and_answers_in_one_step() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    assert desk.takeover(2, B) == [Tell(B, "", TakeoverAnswer(R, G, Attempt(2), (5, 6), None))]
    desk.chunk(A, part(1, (5, 6, 7), 2))
    assert desk.said() == [Tell(A, "", Refused(R, G, Attempt(1), minimum=Attempt(2)))]


def test_takeover_is_answered_without_log_probabilities_that_no_message_can_hold() -> None:
    desk, text = Desk().opened(), (5,) * 4000
    entry = TokenLogprobs(-1.0, 1, (5,) * 20, (-1.0,) * 20)
    desk.chunk(A, part(1, text)._replace(logprobs=(entry,) * len(text)))
    assert desk.takeover(2, B) == [Tell(B, "", TakeoverAnswer(R, G, Attempt(2), text, None))]


def test_what_is_told_of_a_prompt_goes_with_the_first_id_alone() -> None:
    prompt = PromptTold((2,), (TokenLogprobs(-1.0, 1),))
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6))._replace(prompt=prompt))
    passed = desk.one(Pass)
    assert isinstance(passed, Pass) and passed.prompt == prompt
    desk.chunk(A, part(1, (5, 6, 7))._replace(prompt=prompt))  # an owner that starts anew says it again
    passed = desk.one(Pass)
    assert isinstance(passed, Pass) and (passed.ids, passed.prompt) == ((7,), None)
    yes = TakeoverAnswer(R, G, Attempt(2), (5, 6, 7), None, (), prompt)
    assert desk.takeover(2, B) == [Tell(B, "", yes)]


@pytest.mark.parametrize("held", [(), (5,)])
def test_a_record_tells_of_the_prompt_who_holds_nothing(held: tuple[int, ...]) -> None:
    prompt = PromptTold((2,), (TokenLogprobs(-1.0, 1),))
    desk = Desk().opened()
    if held:
        desk.chunk(A, part(1, held)._replace(prompt=prompt))
    desk.chunk(A, finishes=(finish(1, (5, 6)),))  # the part was lost
    desk.read(replace(terminal((5, 6)), prompt=prompt))
    passed = desk.one(Pass)
    assert isinstance(passed, Pass) and passed.prompt == (None if held else prompt)


def test_takeover_may_be_asked_again_by_the_same_boot() -> None:
    desk = Desk().opened()
    desk.takeover(2, B)
    assert desk.takeover(2, B) == [Tell(B, "", TakeoverAnswer(R, G, Attempt(2), (), None))]


def test_takeover_not_above_the_minimum_is_refused() -> None:
    desk = Desk().opened()
    desk.takeover(2, B)
    for attempt in (1, 2):
        no = TakeoverAnswer(R, G, Attempt(attempt), None, Attempt(2))
        assert desk.takeover(attempt, A) == [Tell(A, "", no)]


# ---- OPEN: the end ---------------------------------------------------------------------------------


def test_finish_that_fits_ends() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)), finishes=(finish(1, (5, 6)),))
    assert [type(e) for e in desk.out] == [Pass, End]
    assert desk.core.idle


@pytest.mark.parametrize(
    ("reason", "code"), [(Reason.REFUSED, Code.UNAVAILABLE), (Reason.DEADLINE, Code.DEADLINE_EXCEEDED)]
)
def test_a_refusal_is_a_status_with_its_cause_and_a_hint(reason: Reason, code: Code) -> None:
    desk = Desk().opened()
    desk.chunk(A, finishes=(replace(finish(1, (), reason), error="too many wait", retry_ms=700),))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and (fail.code, fail.retry_ms) == (code, 700)
    assert "too many wait" in fail.message


def test_finish_that_is_not_a_stop_may_be_shorter() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    desk.chunk(B, finishes=(finish(2, (5,), Reason.CANCELLED),))
    end = desk.one(End)
    assert isinstance(end, End) and end.length == 1


@pytest.mark.parametrize("text", [(5,), (5, 9), (5, 6, 7)])
def test_finish_that_does_not_fit_reads_the_record(text: tuple[int, ...]) -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    desk.chunk(A, finishes=(finish(1, text),))
    assert [type(e) for e in desk.out] == [ReadRecord]


def test_terminal_that_continues_passes_on_the_rest() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    desk.wait(1.0)
    desk.answer(None)
    desk.read(terminal((5, 6, 7)))
    assert desk.out[0] == Pass(1, 1, (6, 7)) and isinstance(desk.out[1], End)


@pytest.mark.parametrize(
    ("text", "reason", "diverged"),
    [
        ((5,), Reason.CANCELLED, False),
        ((5,), Reason.STOP, True),
        ((5, 9, 7), Reason.STOP, True),
        ((9,), Reason.CANCELLED, True),
    ],
)
def test_terminal_read_against_what_was_passed_on(
    text: tuple[int, ...], reason: Reason, diverged: bool
) -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    desk.wait(1.0)
    desk.answer(None)
    desk.read(terminal(text, reason))
    if diverged:
        fail = desk.one(Fail)
        assert isinstance(fail, Fail) and fail.code is Code.ABORTED and "diverged" in fail.message
        assert Count("diverged") in desk.out
    else:
        assert [type(e) for e in desk.out] == [End]
    assert len(desk.core) == 0


def test_failed_request_is_an_internal_error() -> None:
    desk = Desk().opened()
    desk.chunk(A, finishes=(replace(finish(1, (), Reason.FAILED), error="poison"),))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.INTERNAL and "poison" in fail.message


# ---- OPEN: silence ---------------------------------------------------------------------------------


def test_silence_of_a_known_owner_asks_it_then_reads_then_asks_the_one_named() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    assert desk.wait(0.99) == []
    assert desk.wait(0.02) == [AskOwner(R, 2, A, Attempt(1), (5,))]
    assert desk.answer(None) == [ReadRecord(R, 3)]
    assert desk.read(claim(2, B)) == [AskOwner(R, 4, B, Attempt(1), (5,))]
    assert desk.answer(AttachKind.ATTACHED) == []
    assert desk.chunk(B, part(2, (5, 6), 1)) == [Pass(1, 1, (6,))]


def test_any_chunk_of_the_owner_ends_the_silence() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    for _ in range(40):
        assert desk.wait(0.2) == []
        desk.chunk(A)


def test_unknown_to_its_owner_reads() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    desk.wait(1.0)
    assert desk.answer(AttachKind.UNKNOWN) == [ReadRecord(R, 3)]


def test_silence_is_repeated_each_second() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    asked = 0
    for _ in range(5):
        desk.wait(1.0)
        desk.answer(None)
        desk.read(claim(1, A))
        desk.answer(None)
        asked += 1
    assert asked == 5


def test_queued_request_reads_every_ten_seconds() -> None:
    desk = Desk().opened()
    assert desk.wait(9.9) == []
    assert [type(e) for e in desk.wait(0.2)] == [ReadRecord]
    assert [type(e) for e in desk.read(None)] == [ReadMessage]
    assert desk.message(PLAIN) == []
    assert desk.wait(9.5) == []
    assert [type(e) for e in desk.wait(0.6)] == [ReadRecord]


@pytest.mark.parametrize("keyed", [True, False])
def test_who_joined_a_queued_request_finds_its_owner_soon(keyed: bool) -> None:
    """The owner sends to the gateway that the message names, which may be another one."""
    desk = Desk()
    if keyed:
        desk.published(desk.submit(KEYED), Publish.TAKEN)
    else:
        desk.resume()
    desk.read(None)
    desk.message(KEYED if keyed else PLAIN)
    for _ in range(3):
        assert [type(e) for e in desk.wait(1.0)] == [ReadRecord]
        if desk.read(None):  # rarer: is it there at all
            desk.message(PLAIN)
    desk.wait(1.0)
    assert [type(e) for e in desk.read(claim(1, A))] == [AskOwner]
    assert desk.answer(AttachKind.ATTACHED) == []
    for _ in range(40):
        desk.wait(0.2)
        assert desk.out == [], "from here on it hears from its owner"
        desk.chunk(A)


class Search:
    """Answers every question of one stream's search for its owner, second by second."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.record: Record | None = None
        self.request: Request | None = None
        self.kind: AttachKind | None = None
        self.record_fails = self.message_fails = False
        self.asked: list[Effect] = []

    def until_failed(self, seconds: float) -> Fail | None:
        end = self.desk.now + seconds
        while self.desk.now < end:
            self.asked += self.desk.wait(0.25)
            while self.asked:
                match self.asked.pop():
                    case ReadRecord():
                        self.asked += self.desk.read(self.record, failed=self.record_fails)
                    case ReadMessage(_, call):
                        found = MessageRead(self.desk.now, R, call, self.request, failed=self.message_fails)
                        self.asked += self.desk.do(found)
                    case AskOwner():
                        self.asked += self.desk.answer(self.kind)
                    case Fail() as fail:
                        return fail
        return None


@pytest.mark.parametrize("record", [None, claim(1, A)])
def test_request_that_nobody_has_ends(record: Record | None) -> None:
    """The broker lost its message, and there is no record, or none whose owner answers."""
    desk = Desk().opened()
    search, start = Search(desk), desk.now
    search.record = record
    fail = search.until_failed(60)
    assert fail is not None and fail.code is Code.UNAVAILABLE and "lost" in fail.message and fail.retry_ms
    assert 25 <= desk.now - start <= 30, "found after 10 s of silence, believed after 15 more"
    assert Count("request lost") in desk.seen and not any(isinstance(e, WriteCancel) for e in desk.seen)
    assert not len(desk.core)


@pytest.mark.parametrize("keyed", [True, False])
def test_request_that_waits_in_the_stream_never_ends_by_itself(keyed: bool) -> None:
    search = Search(Desk().opened(KEYED if keyed else PLAIN))
    search.request = PLAIN
    assert search.until_failed(600) is None


@pytest.mark.parametrize("what", ["record", "message"])
def test_failed_read_is_no_absence(what: str) -> None:
    search = Search(Desk().opened())
    search.record_fails, search.message_fails = what == "record", what == "message"
    assert search.until_failed(600) is None


@pytest.mark.parametrize("sign", ["part", "takeover", "message", "attached", "no answer", "no record"])
def test_every_sign_of_life_starts_the_count_anew(sign: str) -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    search, length = Search(desk), 1
    for _ in range(10):
        assert search.until_failed(14) is None
        match sign:
            case "part":
                length += 1
                desk.chunk(A, part(1, (5,) * length))
            case "takeover":
                desk.takeover(1, A)
            case "message":
                search.request = PLAIN
                assert search.until_failed(6) is None
                search.request = None
            case "attached":
                search.record, search.kind = claim(1, A), AttachKind.ATTACHED
                assert search.until_failed(6) is None
                search.record, search.kind = None, None
            case "no answer":
                search.message_fails = True
                assert search.until_failed(6) is None
                search.message_fails = False
            case _:
                search.record_fails = True
                assert search.until_failed(6) is None
                search.record_fails = False
    assert search.until_failed(60) is not None


def test_cancelled_stream_ends_by_its_own_count() -> None:
    desk = Desk().opened()
    desk.do(CancelWanted(desk.now, R, "t", 1))
    fail = Search(desk).until_failed(60)
    assert fail is not None and fail.code is Code.CANCELLED
    assert not any(isinstance(e, ReadMessage) for e in desk.seen)


def test_stream_that_its_living_owner_forgot_is_found_again() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    for _ in range(60):
        desk.wait(0.2)
        if desk.out:
            break
        desk.chunk(A)
    ask = desk.one(AskOwner)
    assert isinstance(ask, AskOwner) and 109 <= desk.now <= 111


def test_lost_chunk_asks_at_once() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    desk.numbers[A] += 1
    assert desk.chunk(A) == [Count("chunk lost")]
    assert [type(e) for e in desk.wait(0.1)] == [AskOwner]


def test_diverged_owner_is_followed_to_its_record() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5, 6)))
    desk.wait(1.0)
    assert desk.answer(AttachKind.DIVERGED) == []
    assert [type(e) for e in desk.wait(1.0)] == [ReadRecord]
    desk.read(terminal((5, 9)))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.ABORTED


def test_failed_read_is_repeated() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    desk.wait(1.0)
    desk.answer(None)
    assert desk.read(None, failed=True) == []
    assert [type(e) for e in desk.wait(1.0)] == [AskOwner]


# ---- OPEN: cancel, deadline, departure -------------------------------------------------------------


def test_cancel_tells_the_owner_then_writes_until_stored() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    desk.do(CancelWanted(desk.now, R, "t", 1))
    assert desk.out == [Tell(A, "m", CancelAsk(R, "client")), CancelHeard(1, True)]
    for _ in range(4):
        desk.wait(0.24)
        desk.chunk(A)
    assert [type(e) for e in desk.wait(0.05)].count(ReadRecord) == 1
    desk.read(claim(1, A), seq=4)
    assert desk.said() == [WriteCancel(R, desk.said()[0].call, Cancel(Attempt(1), A, "client"), 4)]  # type: ignore[union-attr]
    desk.wrote(Write.REFUSED)
    desk.chunk(A)
    desk.wait(0.3)
    desk.read(claim(2, B), seq=5)
    write = desk.one(WriteCancel)
    assert isinstance(write, WriteCancel) and (write.record.attempt, write.expected_seq) == (2, 5)
    assert Tell(B, "m", CancelAsk(R, "client")) in desk.out
    desk.wrote(Write.STORED)
    desk.chunk(B, finishes=(finish(2, (5,), Reason.CANCELLED),))
    desk.one(End)
    assert desk.core.idle


def test_cancel_before_an_owner_is_known_goes_to_all_batchers() -> None:
    desk = Desk().opened()
    desk.do(CancelWanted(desk.now, R, "t", 1))
    assert Tell(None, "m", CancelAsk(R, "client")) in desk.out


def test_cancel_of_another_tenant_is_not_heard() -> None:
    desk = Desk().opened()
    assert desk.do(CancelWanted(desk.now, R, "other", 1)) == [CancelHeard(1, False)]


def test_terminal_found_by_a_cancel_ends_the_stream() -> None:
    desk = Desk().opened()
    desk.do(CancelWanted(desk.now, R, "t", 1))
    desk.wait(1.0)
    reads = [e.call for e in desk.out if isinstance(e, ReadRecord)]
    assert reads
    desk.do(RecordRead(desk.now, R, reads[-1], terminal((), Reason.CANCELLED), 1))
    assert any(isinstance(e, End) for e in desk.out) and desk.core.idle


def test_cancel_repeats_its_word_while_nothing_ends() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    desk.do(CancelWanted(desk.now, R, "t", 1))
    desk.wait(1.5)
    assert Tell(A, "m", CancelAsk(R, "client")) in desk.out


def test_cancel_without_an_end_fails_in_time() -> None:
    desk = Desk().opened()
    desk.do(CancelWanted(desk.now, R, "t", 1))
    desk.wait(31.0)
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and fail.code is Code.CANCELLED


@pytest.mark.parametrize(
    ("reason", "code"), [("client", Code.CANCELLED), ("deadline", Code.DEADLINE_EXCEEDED)]
)
@pytest.mark.parametrize("way", ["stored", "found after an unknown write", "found by a search", "joined"])
def test_a_cancel_that_nothing_came_before_ends_the_stream(way: str, reason: str, code: Code) -> None:
    """While there is no batcher: none that comes may begin it."""
    record = Cancel(Attempt(0), BootId(""), reason)
    if way == "joined":
        desk = Desk()
        desk.resume()
        desk.read(record)
        desk.message(PLAIN)
    elif way == "found by a search":
        desk = Desk().opened()
        search = Search(desk)
        search.record = record
        assert search.until_failed(11) is not None
    else:
        desk = Desk().opened(replace(PLAIN, timeout_ms=1000))
        if reason == "client":
            desk.do(CancelWanted(desk.now, R, "t", 1))
        desk.wait(1.1 if reason == "client" else 3.1)
        desk.read(None)
        assert desk.one(WriteCancel).record == record  # type: ignore[union-attr]
        desk.wrote(Write.STORED if way == "stored" else Write.UNKNOWN)
        if way != "stored":
            assert not any(isinstance(e, Fail) for e in desk.seen)
            desk.wait(0.3)
            desk.read(record)
    (fail,) = [e for e in desk.seen if isinstance(e, Fail)]
    assert fail.code is code and desk.core.idle


@pytest.mark.parametrize("written", [Write.REFUSED, Write.UNKNOWN])
def test_a_cancel_that_may_not_be_stored_ends_nothing(written: Write) -> None:
    desk = Desk().opened()
    desk.do(CancelWanted(desk.now, R, "t", 1))
    desk.wait(1.1)
    desk.read(None)
    desk.wrote(written)
    desk.wait(0.3)
    desk.read(claim(1, A), seq=1)
    desk.wrote(Write.STORED)
    assert not any(isinstance(e, Fail | End) for e in desk.seen), "its owner says how it ended"


def test_deadline_and_a_second_cancels() -> None:
    desk = Desk().opened(replace(PLAIN, timeout_ms=2000))
    assert desk.wait(2.9) == []
    assert desk.wait(0.2) == [Tell(None, "m", CancelAsk(R, "deadline"))]


def test_deadline_of_a_resumed_request_counts_from_when_it_was_stored() -> None:
    desk = Desk()
    desk.resume()
    desk.read(None)
    desk.message(replace(PLAIN, timeout_ms=2000))  # stored half a second ago
    late = Tell(None, "m", CancelAsk(R, "deadline"))
    assert late not in desk.wait(2.4)
    assert late in desk.wait(0.2)


def test_client_gone_without_window_is_a_cancel() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    assert desk.do(ClientGone(desk.now, 1, R)) == [Tell(A, "m", CancelAsk(R, "disconnect"))]
    assert len(desk.core) == 0 and not desk.core.idle
    assert desk.chunk(A, part(1, (5, 6), 1)) == [Tell(A, "", Refused(R, G, Attempt(1)))], "closed: unknown"
    desk.wait(1.0)
    desk.read(claim(1, A))
    desk.wrote(Write.STORED)
    assert desk.core.idle


def test_client_gone_with_a_window_detaches_and_writes_nothing() -> None:
    desk = Desk().opened(LASTING)
    desk.chunk(A, part(1, (5,)))
    assert desk.do(ClientGone(desk.now, 1, R)) == [Tell(A, "m", Detached(R, G))]
    assert desk.core.idle


def test_client_gone_while_publishing_leaves_once_it_is_stored() -> None:
    desk = Desk()
    call = desk.submit()
    assert desk.do(ClientGone(desk.now, 1, R)) == []
    desk.published(call)
    assert Tell(None, "m", CancelAsk(R, "disconnect")) in desk.out and len(desk.core) == 0


def test_client_gone_while_publishing_is_proven_by_a_part() -> None:
    desk = Desk()
    desk.submit()
    desk.do(ClientGone(desk.now, 1, R))
    desk.chunk(A, part(1, (5,)))
    assert Tell(A, "m", CancelAsk(R, "disconnect")) in desk.out and len(desk.core) == 0


def test_departure_of_an_older_client_changes_nothing() -> None:
    desk = Desk().opened()
    desk.resume((5,))
    assert desk.do(ClientGone(desk.now, 1, R)) == []
    assert len(desk.core) == 1


def test_unknown_parts_are_refused_and_unknown_questions_are_not_answered() -> None:
    desk = Desk()
    assert desk.chunk(A, part(1, (5,))) == [Tell(A, "", Refused(R, G, Attempt(1)))]
    assert desk.takeover(1, A) == []


# ---- cancels by id ---------------------------------------------------------------------------------


def test_cancel_by_id_of_a_request_served_elsewhere() -> None:
    desk = Desk()
    desk.do(CancelWanted(desk.now, R, "t", 7))
    desk.read(claim(2, B))
    desk.message(PLAIN)
    assert CancelHeard(7, True) in desk.out
    desk.wait(1.0)
    desk.read(claim(2, B), seq=3)
    assert Tell(B, "m", CancelAsk(R, "client")) in desk.out
    desk.wrote(Write.STORED)
    assert desk.core.idle


def test_cancel_by_id_of_what_is_not_there_or_not_theirs() -> None:
    desk = Desk()
    desk.do(CancelWanted(desk.now, R, "t", 7))
    desk.read(None)
    desk.message(None)
    desk.wait(0.25)
    desk.read(None)
    desk.message(None)
    assert desk.out == [CancelHeard(7, False)] and desk.core.idle
    desk.do(CancelWanted(desk.now, R, "other", 8))
    desk.read(claim(2, B))
    desk.message(PLAIN)
    assert desk.out == [CancelHeard(8, False)] and desk.core.idle


def test_cancel_by_id_of_what_is_over() -> None:
    desk = Desk()
    desk.do(CancelWanted(desk.now, R, "t", 7))
    assert desk.read(terminal((5,))) == [CancelHeard(7, True)]


def test_cancel_by_id_says_when_the_log_cannot_be_read() -> None:
    desk = Desk()
    desk.do(CancelWanted(desk.now, R, "t", 7))
    for _ in range(8):
        desk.read(None, failed=True)
        if desk.out:
            break
        desk.wait(10.0)
    assert desk.out == [CancelHeard(7, False, "bus: the request's record cannot be read")]


def test_cancel_that_gives_way_to_newer_ones_is_answered() -> None:
    desk = Desk()
    for number in range(LEN_MAX):
        desk.core.handle(CancelWanted(desk.now, RequestId(f"r{number}"), "t", number))
    desk.do(CancelWanted(desk.now, RequestId("one more"), "t", LEN_MAX))
    full = CancelHeard(0, False, "gateway: too many cancels under way")
    assert full in desk.out and Count("cancel evicted") in desk.out and desk.one(ReadRecord)
    assert full not in desk.do(CancelWanted(desk.now, RequestId("r1"), "t", 9)), "the same id needs no room"


# ---- letting go, limits ----------------------------------------------------------------------------


def test_stopping_tells_clients_and_leaves_the_owner_to_count() -> None:
    desk = Desk().opened()
    assert [type(e) for e in desk.do(LetGo(desk.now))] == [Fail]
    assert desk.core.idle


def test_stopping_while_publishing_writes_cancel() -> None:
    desk = Desk()
    desk.submit()
    assert {type(e) for e in desk.do(LetGo(desk.now))} == {Fail, ReadRecord}


def test_too_many_streams_are_refused_at_the_door() -> None:
    desk = Desk(StreamLimits(len_max=1)).opened()
    desk.do(Submit(desk.now, 2, replace(PLAIN, id=RequestId("r2"))))
    fail = desk.one(Fail)
    assert isinstance(fail, Fail) and (fail.client, fail.code) == (2, Code.UNAVAILABLE)


def test_late_completions_are_ghosts() -> None:
    desk = Desk()
    call = desk.submit()
    desk.published(call)
    assert desk.published(call, Publish.TIMEOUT) == []
    assert desk.do(RecordRead(desk.now, R, 99, terminal((1,)), 1)) == []
    assert desk.do(MessageRead(desk.now, R, 99, PLAIN)) == []
    assert desk.do(AttachAnswered(desk.now, R, 99, None)) == []
    assert desk.do(CancelWritten(desk.now, R, 99, Write.STORED)) == []


def test_attach_carries_what_the_wire_needs() -> None:
    desk = Desk().opened()
    desk.chunk(A, part(1, (5,)))
    ask = desk.wait(1.0)[0]
    assert isinstance(ask, AskOwner)
    assert Attach(ask.request_id, ask.attempt, G, ask.held).held == (5,)
