"""Whatever the sizes: every head, inner output and id has its rank, and none is forgotten."""

from dataclasses import dataclass

import pytest

from shard_worker.ranks.shares import inner_unit, refusal, shares


@dataclass(frozen=True)
class Sizes:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 16
    intermediate_size: int = 96
    vocab_size: int = 101


SMOLLM2 = Sizes(9, 3, 64, 1536, 49152)


@pytest.mark.parametrize("sizes", [Sizes(8, 8), Sizes(9, 3), Sizes(8, 2), Sizes(12, 1), Sizes(15, 5)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_nothing_is_forgotten(sizes: Sizes, ranks: int) -> None:
    found = shares(sizes, ranks, inner_unit(sizes, ranks, 1))
    assert len(found) == ranks
    group = sizes.num_heads // sizes.num_kv_heads
    for name, count in (("heads", 0), ("inner", sizes.intermediate_size), ("vocabulary", sizes.vocab_size)):
        ids = [i for share in found for i in getattr(share, name)]
        assert ids == list(range(count or sizes.num_heads))
    assert {h for share in found for h in share.kv_heads} == set(range(sizes.num_kv_heads))
    for share in found:
        assert share.heads and share.inner and share.vocabulary
        assert {head // group for head in share.heads} == set(share.kv_heads)
        assert len(share.heads) % len(share.kv_heads) == 0


def test_uneven_heads_are_made_up_for() -> None:
    """SmolLM2 on two ranks: 3 and 6 query heads, and so much less MLP that both read about the same."""
    less, more = shares(SMOLLM2, 2, inner_unit(SMOLLM2, 2, 32))
    assert (len(less.heads), len(more.heads)) == (3, 6)
    assert (len(less.kv_heads), len(more.kv_heads)) == (1, 2)
    assert len(less.inner) % 32 == len(more.inner) % 32 == 0

    def numbers(share: object, sizes: Sizes = SMOLLM2) -> int:
        heads, kv, inner = (len(getattr(share, name)) for name in ("heads", "kv_heads", "inner"))
        return 2 * sizes.head_dim * (heads + kv) + 3 * inner

    assert numbers(less) == pytest.approx(numbers(more), rel=0.03)


def test_what_stays_together() -> None:
    assert inner_unit(Sizes(8, 8, intermediate_size=2048), 2, 256) == 256
    assert inner_unit(Sizes(8, 8, intermediate_size=96), 2, 1) == 32
    assert inner_unit(Sizes(8, 8, intermediate_size=96), 4, 1) == 8
    assert inner_unit(Sizes(8, 8, intermediate_size=20), 4, 1) == 1


def test_too_many_ranks_are_told_why() -> None:
    assert refusal(Sizes(4, 2), 4) == ""
    assert refusal(Sizes(4, 2), 5) == "the model has 4 query heads (num_attention_heads): at most 4 ranks"
    assert "at most 2 ranks" in refusal(Sizes(4, 2, intermediate_size=2), 3)
    assert "3 ids (vocab_size)" in refusal(Sizes(4, 2, vocab_size=3), 4)
