"""What a stage asks of its device: load a layer range, run a step over it.

The shell calls an executor from one thread at a time; calls block. Implementations: `torch_executor`
(real models) and `fake_model` (numbers that prove the paging right; also the simulation's oracle).
Nothing here imports torch.
"""

from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from chassis.messages.pipeline import PromptAsk
from chassis.messages.sampling import Grammar
from chassis.transport.registered import Memory, MemoryRange

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


class LoadFailed(Exception):
    """The layer range can't be loaded; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    digest: str  # SHA-256 hex of what the weights are
    num_layers: int
    head_cost_layers: float  # cost of final norm, head and sampling, in layers
    activation_bytes: int  # per token, between stages
    context_len_max: int
    card: bytes  # serialized ModelCard
    layer_us: float = 0.0  # what a layer takes here in a decode step, measured; 0: not known
    layers_max: int = 0  # so many there is memory for; 0: as many as there are
    head_layers: float = 0.0  # what embedding or head takes of that, in layers
    ends_layers: float = 0.0  # what both take of it in one stage


@dataclass(frozen=True, slots=True)
class StageSpec:
    stage: int
    num_stages: int
    first_layer: int
    end_layer: int  # exclusive
    block_size_tokens: int
    slots_max: int
    step_tokens_max: int


def check_spec(spec: StageSpec, num_layers: int) -> None:
    """Whether a model of so many layers has such a stage. Raises LoadFailed."""
    if not 0 <= spec.first_layer < spec.end_layer <= num_layers:
        raise LoadFailed(
            f"layers {spec.first_layer} to {spec.end_layer}: out of {num_layers}, and at least one"
        )
    if (spec.stage == 0) != (spec.first_layer == 0):
        raise LoadFailed(f"stage {spec.stage} can't begin at layer {spec.first_layer}")
    if (spec.stage == spec.num_stages - 1) != (spec.end_layer == num_layers):
        raise LoadFailed(f"stage {spec.stage} of {spec.num_stages} can't end at layer {spec.end_layer}")
    if spec.block_size_tokens < 1 or spec.step_tokens_max < 1:
        raise LoadFailed("block size and tokens per step must be at least 1")


@dataclass(frozen=True, slots=True)
class Loaded:
    num_blocks: int
    kv_allocated: bool  # anew: what the blocks held is gone


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step in columns: n rows (sequences), T tokens, k sampling rows.

    `block_tables` row i holds the blocks of row i in order; entries past its length must not be read.
    """

    token_ids: U32  # [T]
    positions: I32  # [T]
    row_offsets: I32  # [n + 1]: tokens of row i are [row_offsets[i], row_offsets[i + 1])
    context_lens: I32  # [n]: tokens in the cache after this step = start + num_tokens
    kv_slots: I64  # [T]: block id * block_size_tokens + offset, where each token's K and V go
    block_tables: I32  # [n, widest]
    sample_rows: I32  # [k]: rows that sample, ascending
    temperature: F32  # [k]
    top_k: I32  # [k], 0 = off
    top_p: F32  # [k]
    seeds: U64  # [k]
    output_index: I32  # [k]
    shaping: "ShapingColumns | None" = None  # None: no row wants more
    sample_slots: I64 | None = None  # [k], where later steps may leave their tokens open
    ahead: "Ahead | None" = None  # None: all ids are known
    prompt_asks: tuple[PromptAsk, ...] = ()  # checked; only the last stage answers them
    compiled: Structure | None = None  # the same as compiled code takes it (`native.library.Step`), if it is


@dataclass(frozen=True, slots=True)
class Ahead:
    """Of a step sent before all its ids were known: `last_sampled` fills them in right before it runs."""

    places: I64  # [a]: tokens whose id is left open, 0 so far
    slots: I64  # [a]: whose last sampled id it is
    shaping: "Callable[[U32], ShapingColumns] | None" = None  # of the [a] ids, if it depends on them


@dataclass(frozen=True, slots=True)
class ShapingColumns:
    """What some of the k sampling rows want beyond that. All rows are places among the k; entries of one
    kind are flat columns, and no (row, id) comes twice in one of them."""

    rows: I64  # ascending: rows whose logits are changed by any of the next three
    bias_rows: I64
    bias_ids: I64
    bias: F32
    allowed: tuple[tuple[int, I64], ...]  # row, ids
    banned_rows: I64
    banned_ids: I64
    penalty_rows: I64
    repetition: F32  # one a penalty row
    frequency: F32
    presence: F32
    seen_lens: I64  # ids of each penalty row, in its prompt or its output
    seen_ids: I64
    seen_counts: F32  # in the output
    min_p_rows: I64
    min_p: F32
    typical_rows: I64
    typical_p: F32
    logprob_rows: I64
    top_logprobs: I64  # how many
    grammars: "tuple[GrammarRow, ...]" = ()  # these rows have their allowed and banned ids here


class Matcher(Protocol):
    """Follows one output through its grammar."""

    def allowed(self, output_ids: Sequence[int], length: int) -> Bool | str | None:
        """[vocabulary]: what may come behind the first `length` ids, each time no fewer than the last time.
        None: the grammar is not compiled yet; a text: it can't be followed, and why."""


MatcherOf = Callable[[Grammar], Matcher]


@dataclass(frozen=True, slots=True)
class GrammarRow:
    """One of the k sampling rows. What else would take all that the grammar allows is void."""

    row: int
    matcher: Matcher
    output_ids: Sequence[int]  # grows behind `length`
    length: int
    allowed: I64  # none: all
    banned: I64


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`activations`: [T * activation_bytes], empty on the last stage; `token_ids`: [k], only there."""

    activations: memoryview
    token_ids: U32
    logprobs: "LogprobColumns | None" = None
    prompts: "LogprobColumns | None" = None  # of all asks, one after another: `places` are among the T
    nan_rows: tuple[int, ...] = ()  # among the k, ascending: logits were no numbers, ids stand for nothing
    waiting_rows: tuple[int, ...] = ()  # among the k, ascending: their grammar is compiled still, the same
    refused_rows: tuple[tuple[int, str], ...] = ()  # among the k, ascending: it can't be followed, and why
    direct: MemoryRange | None = None  # activations that were told to stay on the device

    @property
    def tells(self) -> bool:
        """Something beside token ids."""
        undrawn = self.nan_rows or self.waiting_rows or self.refused_rows
        return self.logprobs is not None or self.prompts is not None or bool(undrawn)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Of m tokens: natural logarithms of the model's own probabilities, no parameter applied."""

    places: I64  # [m]: among the k that are sampled, ascending
    logprobs: F32  # [m]
    ranks: I64  # [m]: 1 + the number of ids that are likelier
    top_lens: I64  # [m]
    top_ids: I64  # [sum(top_lens)], likeliest first, the lower id first among equals
    top_logprobs: F32


@dataclass(frozen=True, slots=True)
class PageForm:
    """A page is one block in one layer with all its KV heads, exactly as a stage keeps it. `layout` names all
    that its bytes depend on: type, arrangement, sizes. Who keeps another one can't read it."""

    layout: str
    page_bytes: int
    num_layers: int  # of the stage

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.num_layers


class Pages(Protocol):
    """A stage's KV memory as bytes, to leave it for a tier and to come back into any stage's.

    Calls block, and may run beside steps on a thread of their own: what is read is written by nobody
    meanwhile, and what is written is read by nobody.
    """

    @property
    def form(self) -> PageForm: ...

    def read(self, blocks: Sequence[int], into: U8, first_layer: int = 0) -> None:
        """`into`: [n, layers, page_bytes], of the stage's layers from that one on; C-contiguous."""

    def write(self, blocks: Sequence[int], content: U8, first_layer: int = 0) -> None:
        """As `read` gave it, here or elsewhere; no block twice."""


class Executor(Protocol):
    @property
    def facts(self) -> ModelFacts: ...

    @property
    def pages(self) -> Pages | None:
        """Of the KV memory that the last load gave, valid as long as it stays; None: nothing is loaded."""

    def load(self, spec: StageSpec) -> Loaded:
        """Makes the layer range resident; keeps weights and KV memory when nothing relevant changed.

        Raises LoadFailed.
        """

    def copy_blocks(self, sources: U32, targets: U32) -> None:
        """Within the KV memory, in all layers: behind the steps that were begun, before the next. No block is
        both, none is copied to twice."""

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        """`activations` of the previous stage (empty on stage 0). The next run may reuse the output."""


class StepUnderWay(Protocol):
    """A step that a device works on by itself."""

    def ready(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> StepOutput:
        """Blocks; raises what went wrong. Holds until the third step after it begins."""


@runtime_checkable
class AheadExecutor(Executor, Protocol):
    """One that can begin a step before the last is finished, in memory that links may reach (GPUDirect)."""

    def begin(
        self, inputs: StepInputs, activations: memoryview | MemoryRange, stays: bool = False
    ) -> StepUnderWay:
        """As `run`, of at least one token; inputs and activations may be used anew when it returns, a range
        of the device's memory when the result is there. `stays`: activations that go out are left in memory
        of `sends_from`, until the third step after it begins."""

    def slots_on(self, num_bytes: int) -> Memory:
        """On the device. Raises what the device raises."""

    def sends_from(self) -> Memory:
        """Of the last load."""
