"""The ledger against a naive model, under an orderly caller and a disorderly world.

The caller keeps an inventory as the batcher does. The model knows contents only: how often each is
referenced, and when an unreferenced one was last used. A memory of what was written into each block is
the oracle: a match must never return a block that holds anything else.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chassis.errors import RpcRejected
from chassis.ids import BlockHash, BlockId, Epoch
from chassis.messages.kvstore import NO_PARENT, Attach, Commit, Exchange, Exchanged, PoolRef
from kvstore.ledger import Ledger

NUM_BLOCKS = 10
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def chain_of(prompt: tuple[int, ...]) -> list[BlockHash]:
    chain, parent = [], b""
    for token in prompt:
        parent = hashlib.sha256(parent + bytes([token])).digest()
        chain.append(BlockHash(parent))
    return chain


@dataclass
class Sequence:
    """A prompt of one token a block; the first `filled` blocks of its table are written."""

    chain: list[BlockHash]
    table: list[BlockId]
    filled: int = 0
    committed: int = 0


@dataclass
class Model:
    """Contents only. `used` orders unreferenced ones: least recent first, a tail before its head."""

    references: Counter[BlockHash] = field(default_factory=Counter)
    used: dict[BlockHash, tuple[int, int]] = field(default_factory=dict)

    def known(self) -> set[BlockHash]:
        return {h for h, count in self.references.items() if count} | self.used.keys()

    def reference(self, content: BlockHash) -> None:
        self.references[content] += 1
        self.used.pop(content, None)

    def release(self, content: BlockHash, when: tuple[int, int]) -> None:
        self.references[content] -= 1
        if not self.references[content]:
            self.used[content] = when

    def evict(self, count: int) -> None:
        for _ in range(count):
            del self.used[min(self.used, key=self.used.__getitem__)]


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model = Model()
        self.memory: dict[BlockId, BlockHash] = {}  # what was last written
        self.sequences: list[Sequence] = []
        self.idle: list[BlockId] = []
        self.epoch, self.attachment, self.clock = 1, 0, 0
        self.ghosts: list[PoolRef] = []
        self.attach()

    # ---- the caller

    @property
    def ref(self) -> PoolRef:
        return PoolRef("g", Epoch(self.epoch), self.attachment)

    def held(self) -> Counter[BlockId]:
        return Counter(b for s in self.sequences for b in s.table) + Counter(self.idle)

    def free(self) -> int:
        return NUM_BLOCKS - len(self.held()) - len(self.model.used)

    def committed(self) -> dict[BlockId, BlockHash]:
        return {s.table[i]: s.chain[i] for s in self.sequences for i in range(s.committed)}

    def attach(self) -> None:
        """Tells the inventory; what the model thought unreferenced stays as it was."""
        self.ghosts.append(self.ref)
        known = self.ledger.pools.get("g")
        prior = (Epoch(0), 0) if known is None else (known.ref.epoch, known.ref.attachment)
        self.attachment += 1
        held = tuple(self.held().elements())
        self.ledger.attach(
            Attach(self.ref, ("w.1",), NUM_BLOCKS, 16, "n", held, tuple(self.committed().items()), *prior)
        )

    def exchange(self, call: Exchange) -> Exchanged:
        self.clock += 1
        expected = min(call.lease_count, NUM_BLOCKS - len(self.held()))
        done = self.ledger.exchange(call)
        assert len(done.leased) == expected, "less leased than there was"
        assert len(set(done.leased)) == len(done.leased)
        return done

    def take(self, done: Exchanged, evictable: int) -> None:
        """Books a lease: what was not free was evicted."""
        assert not self.held().keys() & set(done.leased), "leased to two"
        self.model.evict(max(0, len(done.leased) - evictable))
        self.idle.extend(done.leased)

    # ---- what it does

    @rule(count=st.integers(0, 4))
    def lease(self, count: int) -> None:
        free = self.free()
        self.take(self.exchange(Exchange(self.ref, lease_count=count)), free)

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=3))
    def start(self, prompts: list[tuple[int, ...]]) -> None:
        chains = [chain_of(p) for p in prompts]
        known = self.model.known()
        matched = self.ledger.match(self.ref, chains)
        for chain, blocks in zip(chains, matched, strict=True):
            length = next((i for i, h in enumerate(chain) if h not in known), len(chain))
            assert len(blocks) == length, "not the longest cached prefix"
            assert [self.memory[b] for b in blocks] == chain[:length], "a lie"
            for content in chain[:length]:
                self.model.reference(content)
            self.sequences.append(Sequence(chain, list(blocks), length, length))

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=3))
    def serve(self, prompts: list[tuple[int, ...]]) -> None:
        """The usual life of a prompt, up to its end."""
        before = len(self.sequences)
        self.start(prompts)
        for which in range(before, len(self.sequences)):
            self.lease(len(self.sequences[which].chain) - self.sequences[which].filled)
            self.write(which, 5)
            self.commit(which)

    @rule(which=st.integers(0, 9), count=st.integers(1, 5))
    def write(self, which: int, count: int) -> None:
        """A step fills idle blocks of a sequence."""
        if not self.sequences:
            return
        sequence = self.sequences[which % len(self.sequences)]
        for _ in range(min(count, len(sequence.chain) - sequence.filled, len(self.idle))):
            block = self.idle.pop(0)
            assert self.held()[block] == 0 and block not in self.committed()
            self.memory[block] = sequence.chain[sequence.filled]
            sequence.table.append(block)
            sequence.filled += 1

    def commits(self, sequence: Sequence) -> tuple[Commit, ...]:
        parents = [NO_PARENT, *sequence.chain]
        return tuple(
            Commit(sequence.table[i], sequence.chain[i], parents[i])
            for i in range(sequence.committed, sequence.filled)
        )

    @rule(which=st.integers(0, 9))
    def commit(self, which: int) -> None:
        if not self.sequences:
            return
        sequence = self.sequences[which % len(self.sequences)]
        self.exchange(Exchange(self.ref, self.commits(sequence)))
        self.book_commits(sequence)

    def book_commits(self, sequence: Sequence) -> None:
        for content in sequence.chain[sequence.committed : sequence.filled]:
            self.model.reference(content)
        sequence.committed = sequence.filled

    @rule(which=st.lists(st.integers(0, 9), min_size=1, max_size=3), lease=st.integers(0, 3))
    def finish(self, which: list[int], lease: int) -> None:
        """Several sequences end in one exchange, which commits what they filled and leases more.

        They are out of the inventory before the exchange is made.
        """
        ending = [self.sequences.pop(i % len(self.sequences)) for i in which[: len(self.sequences)]]
        releases = tuple(b for s in ending for b in s.table)
        call = Exchange(
            self.ref, tuple(c for s in ending for c in self.commits(s)), releases, lease_count=lease
        )
        for sequence in ending:
            self.book_commits(sequence)
        contents = [h for s in ending for h in s.chain[: s.filled]]
        self.clock += 1
        for index in reversed(range(len(contents))):
            self.model.release(contents[index], (self.clock, -index))
        free = self.free()
        self.take(self.exchange(call), free)

    # ---- what the world does

    @rule(kind=st.integers(0, 4), count=st.integers(0, 4), prompt=PROMPT)
    def suffer(self, kind: int, count: int, prompt: tuple[int, ...]) -> None:
        match kind:
            case 0:
                self.attach_anew()
            case 1:
                self.lose_a_reply(count)
            case 2:
                self.lose_a_match(prompt)
            case 3:
                self.batcher_dies()
            case _:
                self.kvstore_dies()

    def attach_anew(self) -> None:
        self.attach()

    def lose_a_reply(self, count: int) -> None:
        """The exchange happens, its caller never hears of it."""
        free = self.free()
        done = self.exchange(Exchange(self.ref, lease_count=count))
        self.model.evict(max(0, len(done.leased) - free))
        self.attach()

    def lose_a_match(self, prompt: tuple[int, ...]) -> None:
        """What only the lost match referenced is as if it was used just now."""
        chain = chain_of(prompt)
        self.ledger.match(self.ref, [chain])
        self.model.used.update({h: (self.clock + 1, 0) for h in chain if h in self.model.used})
        self.model = self.relearn()

    def relearn(self) -> Model:
        """After an attach that drops referenced content, the order among it is the ledger's to choose."""
        self.attach()
        pool = self.ledger.pools["g"]
        model = Model(Counter(self.committed_contents()))
        for when, block in enumerate(pool.index.cached_blocks()):
            content = pool.index.content(block)
            assert content is not None
            model.used[content] = (self.clock, when)
        assert model.known() == self.model.known(), "content was lost or made up"
        self.clock += 1
        order = [self.model.used[h] for h in sorted(model.used, key=model.used.__getitem__)]
        assert order == sorted(order), "the old order was lost"
        return model

    def committed_contents(self) -> Counter[BlockHash]:
        return Counter(h for s in self.sequences for h in s.chain[: s.committed])

    def batcher_dies(self) -> None:
        """Its successor holds nothing and knows nothing; what was committed stays."""
        known = self.model.known()
        self.sequences.clear()
        self.idle.clear()
        self.epoch += 1
        self.attachment = 0
        self.model.references.clear()
        self.model.used.update(dict.fromkeys(known - self.model.used.keys(), (self.clock + 1, 0)))
        self.model = self.relearn()

    def kvstore_dies(self) -> None:
        self.ledger = Ledger()
        self.ghosts.clear()
        self.attach()
        self.model = Model(Counter(self.committed_contents()))

    @precondition(lambda self: self.ghosts)
    @rule(which=st.integers(0, 9), releases=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3))
    def a_ghost_speaks(self, which: int, releases: list[int]) -> None:
        ghost = self.ghosts[which % len(self.ghosts)]
        late = Exchange(ghost, releases=tuple(BlockId(b) for b in releases), lease_count=2)
        with pytest.raises(RpcRejected, match="old epoch"):
            self.ledger.exchange(late)
        with pytest.raises(RpcRejected, match="old epoch"):
            self.ledger.attach(Attach(ghost, ("w.1",), NUM_BLOCKS, 16, "n"))

    @rule(block=st.integers(-1, NUM_BLOCKS + 1), count=st.integers(1, 5))
    def a_bad_release_is_refused(self, block: int, count: int) -> None:
        """More references than there are, beside good work that must not be done either."""
        good = list(self.held().elements())
        bad = [BlockId(abs(block))] * (self.held()[BlockId(abs(block))] + count)
        with pytest.raises(RpcRejected, match="release_blocks"):
            self.ledger.exchange(Exchange(self.ref, releases=(*good, *bad), lease_count=NUM_BLOCKS))

    # ---- what always holds

    @invariant()
    def the_ledger_agrees(self) -> None:
        self.ledger.check()
        pool = self.ledger.pools["g"]
        assert {BlockId(b): n for b, n in enumerate(pool.table.references) if n} == self.held()
        assert dict(pool.index.hashes()).keys() == self.model.known()
        cached = [pool.index.content(b) for b in pool.index.cached_blocks()]
        assert cached == sorted(self.model.used, key=self.model.used.__getitem__), "another order of eviction"

    @invariant()
    def what_is_found_is_whole(self) -> None:
        """Under an orderly caller each held content's parent is held too: nothing is kept in vain."""
        pool = self.ledger.pools["g"]
        known = dict(pool.index.hashes())
        for content in known:
            parent = pool.index.parent(content)
            assert parent in (None, NO_PARENT) or parent in known, "a head was evicted before its tail"
        for content, block in known.items():
            assert self.memory[block] == content


LedgerMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_long_lives(seed: int) -> None:
    """The same machine, driven for long: deep states, where faults are rarer than work."""
    chance = random.Random(seed)
    machine = LedgerMachine()

    def prompts() -> list[tuple[int, ...]]:
        return [
            tuple(chance.randrange(3) for _ in range(chance.randint(1, 5)))
            for _ in range(chance.randint(1, 3))
        ]

    acts: list[tuple[int, Callable[[], object]]] = [
        (8, lambda: machine.serve(prompts())),
        (4, lambda: machine.start(prompts())),
        (6, lambda: machine.lease(chance.randint(0, 4))),
        (6, lambda: machine.write(chance.randrange(10), chance.randint(1, 5))),
        (4, lambda: machine.commit(chance.randrange(10))),
        (20, lambda: machine.finish([chance.randrange(10) for _ in range(chance.randint(1, 3))], 0)),
        (4, lambda: machine.finish([chance.randrange(10)], chance.randint(0, 3))),
        (1, lambda: machine.suffer(chance.randrange(5), chance.randint(0, 4), prompts()[0])),
        (1, lambda: machine.a_ghost_speaks(chance.randrange(10), [chance.randrange(NUM_BLOCKS)])),
        (1, lambda: machine.a_bad_release_is_refused(chance.randrange(NUM_BLOCKS + 1), chance.randint(1, 2))),
    ]
    for _ in range(600):
        if len(machine.sequences) > 6 or not machine.ghosts:
            machine.finish([0, 0, 0], 0)
            machine.attach_anew()
        chance.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
        machine.the_ledger_agrees()
        machine.what_is_found_is_whole()
    assert machine.ledger.stats().evictions or machine.clock > 300
