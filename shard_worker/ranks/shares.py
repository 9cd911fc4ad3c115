"""Pure. What each rank of a stage has of a model: heads, the MLP's inner outputs, the vocabulary.

Rules: a query head lies where its KV head does; with fewer KV heads than ranks a KV head lies on several of
them, each with some of its query heads. What does not divide is shared out unevenly: the last ranks have the
more of heads, and whoever has more heads gets less of the MLP, so that all read about the same of each layer.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


class Sizes(Protocol):
    """Of a model's configuration or a stage's sizes."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    heads: range
    kv_heads: range
    inner: range
    vocabulary: range


def refusal(sizes: Sizes, ranks: int) -> str:
    """Why it can't be shared out between so many; empty: it can."""
    for what, count in (
        ("query heads (num_attention_heads)", sizes.num_heads),
        ("inner outputs (intermediate_size)", sizes.intermediate_size),
        ("ids (vocab_size)", sizes.vocab_size),
    ):
        if count < ranks:
            return f"the model has {count} {what}: at most {count} ranks"
    return ""


def shares(sizes: Sizes, ranks: int, inner_unit: int = 1) -> tuple[Share, ...]:
    """One a rank. `inner_unit`: inner outputs that stay together; `refusal` must be empty."""
    heads = _heads(sizes.num_heads, sizes.num_kv_heads, ranks)
    inner = _inner(sizes, heads, inner_unit)
    vocabulary = _even(sizes.vocab_size, ranks)
    return tuple(
        Share(*of_heads, inner=of_inner, vocabulary=ids)
        for of_heads, of_inner, ids in zip(heads, inner, vocabulary, strict=True)
    )


def inner_unit(sizes: Sizes, ranks: int, packed: int) -> int:
    """The most that may stay together: blocks of weights whose scale is shared (`packed`), whole vectors."""
    for unit in (max(packed, 32), 32, 8):
        if sizes.intermediate_size % unit == 0 and sizes.intermediate_size // unit >= ranks:
            return unit
    return 1


def _even(count: int, parts: int, first: int = 0) -> list[range]:
    """The last have one more, where it does not divide."""
    least, more = divmod(count, parts)
    found = []
    for part in range(parts):
        end = first + least + (part >= parts - more)
        found.append(range(first, end))
        first = end
    return found


def _heads(num_heads: int, num_kv_heads: int, ranks: int) -> list[tuple[range, range]]:
    group = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        kv = _even(num_kv_heads, ranks)
        return [(range(r.start * group, r.stop * group), r) for r in kv]
    found = []
    for head, sharers in enumerate(_even(ranks, num_kv_heads)):
        kv_head = range(head, head + 1)
        found += [(queries, kv_head) for queries in _even(group, len(sharers), head * group)]
    return found


def _inner(sizes: Sizes, heads: list[tuple[range, range]], unit: int) -> list[range]:
    ranks, pieces = len(heads), sizes.intermediate_size // unit
    # Numbers of a layer, over hidden_size: two matrices of each query head, two of each KV head, three inner.
    attention = [2 * sizes.head_dim * (len(queries) + len(kv)) for queries, kv in heads]
    whole = sum(attention) + 3 * sizes.intermediate_size
    wanted = [max(0, whole - ranks * mine) for mine in attention]
    ends, so_far = [0], 0
    for rank, mine in enumerate(wanted):
        so_far += mine
        end = round(pieces * so_far / sum(wanted)) if rank + 1 < ranks else pieces
        ends.append(min(max(end, ends[-1] + 1), pieces - (ranks - rank - 1)))
    return [range(first * unit, end * unit) for first, end in pairwise(ends)]
