"""Pure. How much goes into one event: gRPC clients take messages of 4 MB unless told otherwise.

Sizes are estimates: of a message's fields and their lengths, and the tokens' bytes. What bytes become as text
may be three times as long, so the bound is a quarter of that.
"""

from collections.abc import Callable, Sequence

from chassis.messages.gateway import IdLogprobs, TopLogprob
from chassis.messages.sampling import TokenLogprobs

EVENT_BYTES_MAX = 1 << 20
PLAIN_LEN = 1024  # so many ids without log probabilities are not looked at one by one
ENTRY_BYTES = 32  # of one id, or of one of the likeliest, beside the token's own bytes

TokenBytes = Callable[[int], bytes]


def fitting(ids: Sequence[int], told: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> int:
    """How many of the ids, at least one, fit into an event with their text and what is told of them: of the
    first ids, or nothing."""
    if not told and len(ids) <= PLAIN_LEN:
        return len(ids)
    size = 0
    for place, token_id in enumerate(ids):
        size += ENTRY_BYTES + 2 * len(token_bytes(token_id))  # as text, and in its entry
        if place < len(told):
            size += sum([ENTRY_BYTES + len(token_bytes(other)) for other in told[place].top_ids])
        if size > EVENT_BYTES_MAX and place:
            return place
    return len(ids)


def entries_of(
    ids: Sequence[int], told: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> tuple[IdLogprobs, ...]:
    """As clients get them."""
    return tuple([_entry(*of, token_bytes) for of in zip(ids, told, strict=True)])


def _entry(token_id: int, entry: TokenLogprobs, token_bytes: TokenBytes) -> IdLogprobs:
    top = tuple(
        TopLogprob(other, logprob, token_bytes(other))
        for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    )
    return IdLogprobs(entry.logprob, entry.rank, token_bytes(token_id), top)
