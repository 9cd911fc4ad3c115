"""Where an output ends, against a judge that looks at the whole text each time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.stops import End, Stops, advance
from chassis.messages.request import Limits, Reason

EOS, BARE_EOS = 5, 6
TOKENS = (b"a", b"b", b"ab", b"", b"ba\xff", b"</s>", b"")
STOPS = Stops(TOKENS, (EOS, BARE_EOS))
A, B, AB, EMPTY, BAF = range(5)


def judge(limits: Limits, ids: list[int], prompt_len: int = 3, context: int = 100) -> End | None:
    return STOPS.judge(limits, prompt_len, ids, context)


def test_max_tokens_ends_with_all_text() -> None:
    assert judge(Limits(2), [A]) is None
    assert judge(Limits(2), [A, B]) == End(Reason.LENGTH, 2, None)


def test_a_full_context_ends() -> None:
    assert judge(Limits(50), [A, B], prompt_len=3, context=6) is None
    assert judge(Limits(50), [A, B, A], prompt_len=3, context=6) == End(Reason.LENGTH, 3, None)


def test_a_prompt_that_fills_the_context_ends_at_once() -> None:
    assert judge(Limits(50), [], prompt_len=6, context=6) == End(Reason.LENGTH, 0, None)


def test_eos_stays_in_the_output_and_out_of_the_text() -> None:
    assert judge(Limits(9), [A, AB, EOS]) == End(Reason.STOP, 3, 3)
    assert judge(Limits(9), [A, AB, BARE_EOS]) == End(Reason.STOP, 3, None)


def test_ignore_eos_leaves_stop_ids() -> None:
    limits = Limits(9, ignore_eos=True, stop_token_ids=(B,))
    assert judge(limits, [EOS, BARE_EOS, B]) == End(Reason.STOP, 3, 4)


def test_eos_wins_over_length_on_the_same_id() -> None:
    assert judge(Limits(1), [EOS]) == End(Reason.STOP, 1, 0)


def test_a_stop_string_wins_over_length_on_the_same_id() -> None:
    assert judge(Limits(1, stop=(b"a",)), [A]) == End(Reason.STOP, 1, 0)


def test_stop_string_across_ids() -> None:
    assert judge(Limits(9, stop=(b"ba",)), [A, B, EMPTY, AB]) == End(Reason.STOP, 4, 1)


def test_bytes_that_are_no_character_yet_match_too() -> None:
    assert judge(Limits(9, stop=(b"a\xff",)), [BAF]) == End(Reason.STOP, 1, 1)


def test_the_match_that_completes_earliest_wins() -> None:
    # "aab" completes after "aa": the first in the list loses
    assert judge(Limits(9, stop=(b"aab", b"aa")), [A, AB]) == End(Reason.STOP, 2, 0)
    assert judge(Limits(9, stop=(b"ab", b"b")), [AB]) == End(Reason.STOP, 1, 0)  # a tie: list order
    assert judge(Limits(9, stop=(b"b", b"ab")), [AB]) == End(Reason.STOP, 1, 1)


def test_the_stop_ids_bytes_complete_no_stop_string() -> None:
    assert judge(Limits(9, stop=(b"a</",)), [A, EOS]) == End(Reason.STOP, 2, 1)


def test_nothing_but_length_ends_the_first_min_tokens() -> None:
    limits = Limits(9, min_tokens=2, stop=(b"ab",))
    assert judge(limits, [AB, EOS]) is None
    assert judge(limits, [AB, EOS, BARE_EOS]) == End(Reason.STOP, 3, None)
    assert judge(limits, [B, A, B]) == End(Reason.STOP, 3, 1)  # may begin before
    assert judge(Limits(2, min_tokens=2), [EOS, EOS]) == End(Reason.LENGTH, 2, None)


def test_ids_after_the_end_are_cut() -> None:
    assert judge(Limits(9, stop=(b"ab",)), [A, B, A, B, A]) == End(Reason.STOP, 2, 0)
    assert judge(Limits(2), [A, A, A]) == End(Reason.LENGTH, 2, None)


def test_ids_beyond_the_table_have_no_bytes() -> None:
    assert judge(Limits(9, stop=(b"ab",)), [A, 99, B]) == End(Reason.STOP, 3, 0)


def test_overlapping_beginnings_are_not_lost() -> None:
    assert judge(Limits(9, stop=(b"aab",)), [A, A, A, B]) == End(Reason.STOP, 4, 1)


def reference(limits: Limits, ids: list[int], length_max: int) -> End | None:
    """Looks at all of the text, again and again."""
    stop_ids = {*limits.stop_token_ids} | (set() if limits.ignore_eos else {EOS, BARE_EOS})
    text = b""
    for count, token_id in enumerate(ids, 1):
        if count > limits.min_tokens and token_id in stop_ids:
            return End(Reason.STOP, count, len(text) if TOKENS[token_id] else None)
        old_len, text = len(text), text + TOKENS[token_id]
        found = [
            (at + len(stop), rank, at)
            for rank, stop in enumerate(limits.stop)
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > old_len
        ]
        if count > limits.min_tokens and found:
            return End(Reason.STOP, count, min(found)[2])
        if count >= length_max:
            return End(Reason.LENGTH, count, None)
    return None


@settings(deadline=None, derandomize=True, max_examples=600)
@given(
    st.lists(st.integers(0, len(TOKENS) - 1), max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4).map(str.encode), max_size=3),
    st.integers(0, 4),
    st.booleans(),
)
def test_growing_output_ends_as_the_whole_does(
    ids: list[int], stop: list[bytes], min_tokens: int, ignore_eos: bool
) -> None:
    limits = Limits(10, min_tokens=min_tokens, stop=tuple(stop), ignore_eos=ignore_eos)
    watch = STOPS.watch(limits, 3, 100)
    ends = []
    for token_id in ids:
        end = watch.push(token_id)
        watch.check()
        if end is not None:
            ends.append(end)
            break
    expected = reference(limits, ids, 10)
    assert ends == ([] if expected is None else [expected])
    assert judge(limits, ids) == expected
    STOPS.check()


def test_advance_continues_where_the_watch_is() -> None:
    watch = STOPS.watch(Limits(9, stop=(b"ab",)), 3, 100)
    assert advance(watch, [B, A]) is None
    assert advance(watch, [B]) == End(Reason.STOP, 3, 1)
