"""Pure. What a pool holds as prefixes: runs of blocks that nothing branches from, in a tree.

A run ends where two continue it differently, or nothing does. Its hits are those of all that lies behind it,
for who found more than it has found it too. Where a beginning is not held or was not told, its length counts
from there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chassis.ids import BlockHash
from chassis.messages.cache import Held
from chassis.messages.kvstore import NO_PARENT


@dataclass(slots=True)
class Run:
    last: BlockHash  # names the whole prefix
    blocks: int
    depth_blocks: int  # from the beginning to its end
    whole: bool  # False: where it begins is not known
    hits: int
    references: int  # the most of any block
    unused_ms: int | None  # of the block used last; None: one is in use
    keep: int
    parent: "Run | None" = None
    children: "list[Run]" = field(default_factory=list)


def runs_of(held: Iterable[Held]) -> list[Run]:
    """All runs, parents before children."""
    known = _joined(held)
    following: dict[BlockHash, list[BlockHash]] = {}
    starts: list[tuple[BlockHash, Run | None, bool]] = []
    for content, block in known.items():
        if block.parent is not None and block.parent in known:
            following.setdefault(block.parent, []).append(content)
        else:
            starts.append((content, None, block.parent == NO_PARENT))
    runs: list[Run] = []
    while starts:
        content, parent, whole = starts.pop()
        run = _run(content, parent, whole, known, following)
        runs.append(run)
        starts += [(child, run, whole) for child in following.get(run.last, ())]
    for run in reversed(runs):
        if run.parent is not None:
            run.parent.hits += run.hits
    return runs


def _joined(held: Iterable[Held]) -> dict[BlockHash, Held]:
    """One entry for blocks that hold the same."""
    known: dict[BlockHash, Held] = {}
    for block in held:
        twin = known.get(block.content)
        if twin is not None:
            block = block._replace(
                references=block.references + twin.references,
                unused_ms=None if twin.unused_ms is None else block.unused_ms,
            )
        known[block.content] = block
    return known


def _run(
    content: BlockHash,
    parent: Run | None,
    whole: bool,
    known: dict[BlockHash, Held],
    following: dict[BlockHash, list[BlockHash]],
) -> Run:
    first = known[content]
    depth = parent.depth_blocks if parent is not None else 0
    run = Run(content, 0, depth, whole, 0, 0, first.unused_ms, first.keep, parent)
    while True:
        block = known[content]
        run.last = content
        run.blocks += 1
        run.depth_blocks += 1
        run.hits += block.hits
        run.references = max(run.references, block.references)
        run.keep = min(run.keep, block.keep)
        if run.unused_ms is not None:
            run.unused_ms = None if block.unused_ms is None else min(run.unused_ms, block.unused_ms)
        after = following.get(content, ())
        if len(after) != 1:
            break
        content = after[0]
    if parent is not None:
        parent.children.append(run)
    return run


def top(runs: Sequence[Run], count: int, by: str) -> list[Run]:
    """The `count` first by `hits` or `length` and what they continue, in the order of the tree."""
    if by == "hits":
        ranked = sorted(runs, key=lambda r: (-r.hits, -r.depth_blocks))
    else:
        ranked = sorted(runs, key=lambda r: (-r.depth_blocks, -r.hits))
    chosen: dict[BlockHash, Run] = {}
    for run in ranked:
        line = [run]
        while (parent := line[-1].parent) is not None and parent.last not in chosen:
            line.append(parent)
        if run.last not in chosen and len(chosen) + len(line) <= count:
            chosen.update((r.last, r) for r in line)
    ordered: list[Run] = []
    stack = [r for r in reversed(ranked) if r.parent is None and r.last in chosen]
    while stack:
        run = stack.pop()
        ordered.append(run)
        children = [r for r in run.children if r.last in chosen]
        stack += sorted(children, key=lambda r: (r.hits, r.depth_blocks))
    return ordered
