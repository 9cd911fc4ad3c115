"""Text comes whole code points at a time, never with a stop in it, and adds up to the whole."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from chassis.messages.card import TokenBytes
from gateway.detokenizer import Detokenizer, OutputText
from gateway.holdback import Holdback

FAST = settings(deadline=None, derandomize=True, max_examples=120)
BYTES = TokenBytes.of(bytes([b]) for b in range(256))
TEXT = st.text(alphabet="ab \u00e9\u20ac\U0001f30a", max_size=40)
SMALL = st.binary(min_size=1, max_size=4).map(lambda b: bytes(97 + x % 3 for x in b))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


@given(TEXT, st.lists(st.integers(0, 120)))
@FAST
def test_deltas_are_whole_code_points_and_add_up(text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    deltas = [detokenizer.feed(piece) for piece in split(text.encode(), cuts)]
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) + detokenizer.feed(b"", final=True) == text


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
@example(b"\xf0\x9f\x8c", [1, 2])
@example(b"\xe2\x82a", [1, 2])
@FAST
def test_malformed_bytes_decode_as_in_one_piece(data: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    text = "".join(detokenizer.feed(piece) for piece in split(data, cuts)) + detokenizer.feed(b"", final=True)
    assert text == data.decode("utf-8", "replace")


def test_first_space_is_dropped_once() -> None:
    table = TokenBytes.of([b" a", b"", b" "])
    text = OutputText(table, strip_leading_space=True)
    assert [text.feed([1]), text.feed([0]), text.feed([0])] == ["", "a", " a"]
    assert OutputText(table, strip_leading_space=True).feed([2, 2]) == " "


def test_ids_without_bytes_or_outside_the_vocabulary_add_nothing() -> None:
    assert OutputText(TokenBytes.of([b"a", b""])).feed([0, 1, 7, 0]) == "aa"


def held_by_definition(tokens: list[bytes], stops: list[bytes]) -> int:
    """How many bytes of the tail are to be held, straight from the rule."""
    whole = b"".join(tokens)
    last = len(tokens[-1]) if tokens else 0
    for start in range(len(whole)):
        tail = whole[start:]
        for stop in stops:
            if len(tail) < len(stop) and stop.startswith(tail):
                return len(tail)
            if tail.startswith(stop) and start + len(stop) > len(whole) - last:
                return len(tail)
    return 0


@given(st.lists(SMALL, max_size=20), st.lists(SMALL, min_size=1, max_size=3))
@FAST
def test_held_back_only_while_the_tail_may_become_a_stop(tokens: list[bytes], stops: list[bytes]) -> None:
    holdback = Holdback(stops)
    released = b""
    for n, token in enumerate(tokens, 1):
        released += holdback.feed(token)
        whole = b"".join(tokens[:n])
        assert released == whole[: len(whole) - held_by_definition(tokens[:n], stops)]
    assert released + holdback.finish(None) == b"".join(tokens)


@given(st.lists(SMALL, max_size=20), st.lists(SMALL, min_size=1, max_size=3))
@FAST
def test_text_before_a_stop_is_exact_and_nothing_of_it_leaks(tokens: list[bytes], stops: list[bytes]) -> None:
    """The owner ends at the token that completes the first stop: cut there, as it would."""
    holdback = Holdback(stops)
    released, whole = b"", b""
    for token in tokens:
        released += holdback.feed(token)
        whole += token
        found = [whole.find(stop) for stop in stops if stop in whole]
        if found:
            cut = min(found)
            assert released == whole[: len(released)] and len(released) <= cut
            assert released + holdback.finish(cut) == whole[:cut]
            return
    assert released + holdback.finish(None) == whole


@given(TEXT, st.lists(st.integers(0, 120)), st.integers(0, 120))
@FAST
def test_resumed_text_is_the_rest(text: str, cuts: list[int], resume_at: int) -> None:
    """What a stream gave for n ids depends on those alone: another gateway continues exactly there."""
    ids = list(text.encode())
    stops = ["a\u00e9".encode(), b" b"]
    first = OutputText(BYTES, stops)
    n = min(resume_at, len(ids))
    given_before = "".join(first.feed(list(piece)) for piece in split(bytes(ids[:n]), cuts))
    second = OutputText(BYTES, stops)
    assert second.feed(ids[:n]) == given_before
    rest = second.feed(ids[n:]) + second.end([], None)
    assert given_before + rest == text


def test_stop_across_tokens_is_cut_inside_a_token() -> None:
    table = TokenBytes.of([b"one", b" ST", b"OP now"])
    text = OutputText(table, [b"STOP"])
    assert [text.feed([0]), text.feed([1]), text.feed([2])] == ["one", " ", ""]
    assert text.end([], 4) == ""


def test_stop_that_was_not_one_is_released_by_the_next_token() -> None:
    table = TokenBytes.of([b"STOP", b"go"])
    text = OutputText(table, [b"STOP"])
    assert [text.feed([0]), text.feed([1])] == ["", "STOPgo"]


def test_cut_before_a_partial_code_point_is_replaced_at_the_end() -> None:
    text = OutputText(BYTES, [b"\xac!"])
    assert text.feed(list("\u20ac!".encode())) == ""
    assert text.end([], 2) == "\ufffd"


def test_token_that_ends_by_itself_is_held_and_its_bytes_do_not_count() -> None:
    table = TokenBytes.of([b"a", b"\n", b""])
    text = OutputText(table, stop_ids=(1, 2), min_tokens=1)
    assert [text.feed([1]), text.feed([0]), text.feed([1])] == ["\n", "a", ""]
    assert text.end([], 2) == ""
    text = OutputText(table, stop_ids=(1,))
    assert [text.feed([0, 1]), text.feed([0]), text.end([1], None)] == ["a", "\na", "\n"]


@given(TEXT, st.lists(st.integers(0, 120)), st.integers(0, 160), st.booleans())
@FAST
def test_end_cuts_whatever_is_known_of_stops(
    text: str, cuts: list[int], byte_cut: int, at_once: bool
) -> None:
    """With ids and their end together (a record that was read), the cut needs no stops to be exact."""
    ids = list(text.encode())
    out = OutputText(BYTES)
    n = 0 if at_once else min(len(ids), byte_cut)
    given_before = "".join(out.feed(list(piece)) for piece in split(bytes(ids[:n]), cuts))
    whole = bytes(ids[:byte_cut]).decode("utf-8", "replace")
    assert given_before + out.end(ids[n:], byte_cut) == whole
