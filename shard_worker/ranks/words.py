"""Pure. What the ranks of a stage say to each other: as frames' bytes and back.

Columns lie one after another as they are in memory, the wider numbers first, so that each begins where its
type may. What does not parse is a BadWord: the peer is not one of ours.
"""

import struct
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from shard_worker.executor import F32, I32, I64, U32, U64, StageSpec, StepInputs

T = TypeVar("T")
_STEP = struct.Struct("<IIIiQ")  # tokens, rows, width of the block tables, wanted or -1, bytes of activations
_PAGES = struct.Struct("<QIIII")  # memory's turn, first layer, layers, blocks, nothing
NO_ROWS: I32 = np.empty(0, np.int32)
NO_NUMBERS: F32 = np.empty(0, np.float32)
NO_SEEDS: U64 = np.empty(0, np.uint64)


class BadWord(Exception):
    """It does not parse; the message says what."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Of who joins. `settings`: all that the numbers depend on beside the model's digest; `place`: the same
    in processes that can share memory, empty: in none; `layers_max`: that there is room for, 0: for all."""

    rank: int
    ranks: int
    pages: bool  # the connection for pages, not that for steps
    pid: int
    digest: str
    settings: str
    place: str
    layers_max: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Where the ranks meet for sums: in a file of memory, or at a port of the host that was joined."""

    store_port: int
    file: str


@dataclass(frozen=True, slots=True)
class Answer:
    """`blocks`: what KV memory has room for, or is to have; `layout` and `page_bytes`: of this rank's pages;
    `error` empty: it worked."""

    blocks: int = 0
    error: str = ""
    layout: str = ""
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    anew: bool
    stage: int
    num_stages: int
    first_layer: int
    end_layer: int
    block_size_tokens: int
    slots_max: int
    step_tokens_max: int

    @classmethod
    def of(cls, spec: StageSpec, anew: bool) -> "Load":
        return cls(anew, **asdict(spec))

    @property
    def spec(self) -> StageSpec:
        named = asdict(self)
        del named["anew"]
        return StageSpec(**named)


def pack(word: Hello | Welcome | Answer | Load) -> bytes:
    return orjson.dumps(asdict(word))


def parse(kind: type[T], data: memoryview) -> T:
    """Raises BadWord."""
    try:
        found = orjson.loads(data)
        wanted: dict[str, Any] = kind.__annotations__
        assert isinstance(found, dict) and found.keys() == wanted.keys()
        assert all(type(value) is wanted[name] for name, value in found.items())
        return kind(**found)
    except (ValueError, AssertionError) as error:
        raise BadWord(f"no {kind.__name__}: {error}") from None


# ---- columns ----------------------------------------------------------------------------------------


def pack_step(inputs: StepInputs, wanted: I64 | None, activations: memoryview) -> list[bytes | memoryview]:
    """What layers need of a step; who samples has the rest."""
    tables = np.ascontiguousarray(inputs.block_tables)
    num_rows, width = tables.shape
    num_wanted = -1 if wanted is None else len(wanted)
    head = _STEP.pack(len(inputs.token_ids), num_rows, width, num_wanted, activations.nbytes)
    columns: list[NDArray[Any]] = [
        inputs.kv_slots,
        *([] if wanted is None else [wanted]),
        inputs.token_ids,
        inputs.positions,
        inputs.row_offsets,
        inputs.context_lens,
        tables,
    ]
    return [head, *(column.tobytes() for column in columns), activations.cast("B")]


def parse_step(data: memoryview) -> tuple[StepInputs, I64 | None, memoryview]:
    """Views of `data`. Raises BadWord."""
    cursor = _Cursor(data)
    num_tokens, num_rows, width, num_wanted, num_bytes = _STEP.unpack(cursor.bytes(_STEP.size))
    kv_slots: I64 = cursor.column(np.int64, num_tokens)
    wanted: I64 | None = None if num_wanted < 0 else cursor.column(np.int64, num_wanted)
    inputs = StepInputs(
        token_ids=cursor.column(np.uint32, num_tokens),
        positions=cursor.column(np.int32, num_tokens),
        row_offsets=cursor.column(np.int32, num_rows + 1),
        context_lens=cursor.column(np.int32, num_rows),
        kv_slots=kv_slots,
        block_tables=cursor.column(np.int32, num_rows * width).reshape(num_rows, width),
        sample_rows=NO_ROWS,
        temperature=NO_NUMBERS,
        top_k=NO_ROWS,
        top_p=NO_NUMBERS,
        seeds=NO_SEEDS,
        output_index=NO_ROWS,
    )
    activations = cursor.bytes(num_bytes)
    cursor.end()
    return inputs, wanted, activations


def pack_copy(sources: U32, targets: U32) -> bytes:
    return np.concatenate((sources, targets)).astype(np.uint32).tobytes()


def parse_copy(data: memoryview) -> tuple[U32, U32]:
    """Raises BadWord."""
    cursor = _Cursor(data)
    count = len(data) // 8
    found: tuple[U32, U32] = cursor.column(np.uint32, count), cursor.column(np.uint32, count)
    cursor.end()
    return found


def parse_places(data: memoryview) -> I64:
    """Of LOGITS. Raises BadWord."""
    cursor = _Cursor(data)
    places: I64 = cursor.column(np.int64, len(data) // 8)
    cursor.end()
    return places


@dataclass(frozen=True, slots=True)
class PageCall:
    """`turn`: which memory is meant, counted since the process began."""

    turn: int
    first_layer: int
    num_layers: int
    blocks: tuple[int, ...]


def pack_pages(call: PageCall) -> bytes:
    head = _PAGES.pack(call.turn, call.first_layer, call.num_layers, len(call.blocks), 0)
    return head + np.array(call.blocks, np.uint32).tobytes()


def parse_pages(data: memoryview) -> tuple[PageCall, memoryview]:
    """And the content that follows. Raises BadWord."""
    cursor = _Cursor(data)
    turn, first_layer, num_layers, count, _ = _PAGES.unpack(cursor.bytes(_PAGES.size))
    blocks = cursor.column(np.uint32, count).tolist()
    return PageCall(turn, first_layer, num_layers, tuple(blocks)), cursor.rest()


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def bytes(self, size: int) -> memoryview:
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise BadWord("cut off")
        self._at += size
        return part

    def column(self, kind: type[np.generic], count: int) -> NDArray[Any]:
        return np.frombuffer(self.bytes(count * np.dtype(kind).itemsize), kind)

    def rest(self) -> memoryview:
        return self._data[self._at :]

    def end(self) -> None:
        if self._at != len(self._data):
            raise BadWord(f"{len(self._data) - self._at} bytes too many")
