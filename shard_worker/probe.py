"""Pure. Steps made by hand: for checks and measurements, which have no batcher."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shard_worker.executor import StepInputs


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """Tokens `ids` of a sequence, from position `start` on; `blocks` hold all its tokens."""

    ids: Sequence[int]
    start: int
    blocks: Sequence[int]


def probe_inputs(rows: Sequence[ProbeRow], block_size_tokens: int) -> StepInputs:
    """A step in which every row's last token yields the likeliest next one."""
    counts = np.array([len(row.ids) for row in rows])
    ends = np.array([row.start + len(row.ids) for row in rows])
    assert all(len(row.blocks) * block_size_tokens >= end for row, end in zip(rows, ends, strict=True))
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int32)
    for i, row in enumerate(rows):
        tables[i, : len(row.blocks)] = row.blocks
    positions = np.concatenate(
        [np.arange(row.start, row.start + len(row.ids), dtype=np.int32) for row in rows]
    )
    row_of = np.repeat(np.arange(len(rows)), counts)
    return StepInputs(
        token_ids=np.concatenate([np.array(row.ids, np.uint32) for row in rows]),
        positions=positions,
        row_offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=ends.astype(np.int32),
        kv_slots=tables[row_of, positions // block_size_tokens].astype(np.int64) * block_size_tokens
        + positions % block_size_tokens,
        block_tables=tables,
        sample_rows=np.arange(len(rows), dtype=np.int32),
        temperature=np.zeros(len(rows), np.float32),
        top_k=np.zeros(len(rows), np.int32),
        top_p=np.ones(len(rows), np.float32),
        seeds=np.zeros(len(rows), np.uint64),
        output_index=np.zeros(len(rows), np.int32),
    )
