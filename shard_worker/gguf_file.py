"""Reads GGUF files (ggml-org/ggml, docs/gguf.md): metadata, and tensors out of a memory map.

The `gguf` package knows the quantised formats; its reader, though, takes five seconds for a tokenizer's
metadata, and trusts the file. Here every length is checked before it is used, and a file that is cut off,
damaged or of a kind we don't know is `LoadFailed`, never a crash or a wrong tensor.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shard_worker.executor import LoadFailed
from shard_worker.formats import FORMAT_OF, numbers_of
from shard_worker.gguf_names import INTERLEAVED, gguf_name, hf_name
from shard_worker.model.config import ModelConfig
from shard_worker.model.gguf_config import FACTOR_TENSORS, config_from_gguf
from shard_worker.model.stage_weights import F32, U8, StoredMatrix, WeightFormat

MAGIC = b"GGUF"
VERSIONS = (2, 3)
COUNT_MAX = 1 << 24
DIMS_MAX = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U64 = struct.Struct("<Q")
U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # rows first, as torch has it
    kind: GGMLQuantizationType
    offset: int  # in the file
    num_bytes: int


class _Cursor:
    """A place in the file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.size, self.at, self.path = data, len(data), 0, path

    def fail(self, why: str) -> LoadFailed:
        return LoadFailed(f"{self.path}: not a whole GGUF file: {why} (byte {self.at} of {self.size})")

    def skip(self, num_bytes: int) -> int:
        start = self.at
        if num_bytes > self.size - start:
            raise self.fail("cut off")
        self.at = start + num_bytes
        return start

    def u32(self) -> int:
        return int(U32.unpack_from(self.data, self.skip(4))[0])

    def count(self) -> int:
        value = int(U64.unpack_from(self.data, self.skip(8))[0])
        if value > COUNT_MAX:
            raise self.fail(f"a count of {value}")
        return value

    def text(self) -> str:
        length = self.count()
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("text that is not UTF-8") from None

    def value(self) -> object:
        return self.value_of(self.u32())

    def value_of(self, kind: int) -> object:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, length = self.u32(), self.count()
            if inner == STRING:
                return [self.text() for _ in range(length)]
            if inner not in SCALARS:
                raise self.fail(f"an array of unknown kind {inner}")
            form = f"<{length}{SCALARS[inner]}"
            return list(struct.unpack_from(form, self.data, self.skip(struct.calcsize(form))))
        if kind not in SCALARS:
            raise self.fail(f"a value of unknown kind {kind}")
        form = "<" + SCALARS[kind]
        return struct.unpack_from(form, self.data, self.skip(struct.calcsize(form)))[0]


class GgufFile:
    """`metadata`: every key with its value. `tensors`: what lies where. The file stays mapped."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise LoadFailed(f"{path}: can't be read: {error}") from None
        self.path = path
        cursor = _Cursor(self._map, path)
        if self._map[:4] != MAGIC:
            raise LoadFailed(f"{path}: not a GGUF file")
        cursor.skip(4)
        version = cursor.u32()
        if version not in VERSIONS:
            raise LoadFailed(f"{path}: GGUF version {version} is not one of {VERSIONS}")
        num_tensors, num_values = cursor.count(), cursor.count()
        self.metadata: dict[str, object] = {}
        for _ in range(num_values):
            key = cursor.text()
            if key in self.metadata:
                raise LoadFailed(f"{path}: {key} comes twice")
            self.metadata[key] = cursor.value()
        infos = [self._read_info(cursor) for _ in range(num_tensors)]
        self.tensors = self._place(infos, cursor)

    @staticmethod
    def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_dims = cursor.text(), cursor.u32()
        if not 0 < num_dims <= DIMS_MAX:
            raise cursor.fail(f"{name} has {num_dims} dimensions")
        shape = tuple(reversed([cursor.count() for _ in range(num_dims)]))
        try:
            kind = GGMLQuantizationType(cursor.u32())
        except ValueError as error:
            raise cursor.fail(f"{name}: {error}") from None
        return name, shape, kind, int(U64.unpack_from(cursor.data, cursor.skip(8))[0])

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], cursor: _Cursor
    ) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise cursor.fail(f"an alignment of {alignment!r}")
        base = -(-cursor.at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            block_len, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block_len or name in placed:
                raise LoadFailed(f"{self.path}: {name} has a row of {shape[-1]} or comes twice")
            num_bytes = block_bytes
            for size in (*shape[:-1], shape[-1] // block_len):
                num_bytes *= size
            if offset % alignment or base + offset + num_bytes > cursor.size:
                raise LoadFailed(f"{self.path}: {name} lies outside the file: it is cut off or damaged")
            placed[name] = TensorInfo(shape, kind, base + offset, num_bytes)
        end = 0
        for name, info in sorted(placed.items(), key=lambda item: item[1].offset):
            if info.num_bytes and info.offset < end:
                raise LoadFailed(f"{self.path}: {name} overlaps the tensor before it")
            end = max(end, info.offset + info.num_bytes)
        return placed

    def let_go(self) -> None:
        """Of pages, and for good of the tokenizer's words, of which the model's card is made."""
        self._map.madvise(mmap.MADV_DONTNEED)
        for key in [key for key, value in self.metadata.items() if isinstance(value, list)]:
            del self.metadata[key]

    def packed(self, name: str) -> U8:
        """[rows, bytes of a row], a view of the file."""
        info = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        rows = 1
        for size in info.shape[:-1]:
            rows *= size
        return flat.reshape(rows, -1)


class GgufCheckpoint:
    """A model in one GGUF file, under Hugging Face's names and layout."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.path = path
        tensors = self.file.tensors
        if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
            raise LoadFailed(f"{path}: no token_embd.weight of two dimensions")
        factors = {
            name: tuple(self._numbers(name, self.file.packed(name)).flatten().tolist())
            for name in FACTOR_TENSORS
            if name in tensors
        }
        try:
            self.config: ModelConfig = config_from_gguf(
                self.metadata,
                vocab_size=tensors["token_embd.weight"].shape[0],
                tied_head="output.weight" not in tensors,
                factors=factors,
            )
        except LoadFailed as error:
            raise LoadFailed(f"{path}: {error}") from None
        self._architecture = str(self.metadata["general.architecture"])

    @property
    def metadata(self) -> Mapping[str, object]:
        return self.file.metadata

    @property
    def content_paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def let_go(self) -> None:
        self.file.let_go()

    def names_under(self, prefix: str) -> list[str]:
        """Of the tensors in layers whose names begin so."""
        names = [hf_name(self._architecture, name) for name in self.file.tensors if name.startswith("blk.")]
        return [name for name in names if name.startswith(prefix)]

    @property
    def layers_found(self) -> int:
        return len({name.split(".")[1] for name in self.file.tensors if name.startswith("blk.")})

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Float32, expanded. Raises LoadFailed when it is missing or has another shape."""
        own, packed = self._rows_of(name, shape)
        numbers = self._numbers(own, packed)
        return torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy()).view(shape)

    def matrix(self, name: str, shape: tuple[int, int]) -> StoredMatrix:
        """As it lies in the file, in what formats the engine knows; else in float32. Raises LoadFailed."""
        own, packed = self._rows_of(name, shape)
        format = FORMAT_OF.get(self.file.tensors[own].kind)
        if format is None:
            format, packed = WeightFormat.F32, self._numbers(own, packed).view(np.uint8)
        return StoredMatrix(format, packed, shape[1])

    def _rows_of(self, name: str, shape: tuple[int, ...]) -> tuple[str, U8]:
        """The file's own name of a tensor, and its rows in Hugging Face's order. Raises LoadFailed."""
        own = gguf_name(self._architecture, name)
        info = self.file.tensors.get(own)
        if info is None:
            raise LoadFailed(f"{self.path}: no tensor {own}")
        if info.shape != shape:
            raise LoadFailed(f"{self.path}: {own} has shape {info.shape}, the configuration says {shape}")
        packed = self.file.packed(own)
        if self._architecture in INTERLEAVED and own.endswith(("attn_q.weight", "attn_k.weight")):
            packed = self._rows_as_halves(packed)
        return own, packed

    def _rows_as_halves(self, packed: U8) -> U8:
        """GGUF interleaves the two halves of each head of Q and K for its rotary kernel; undone here."""
        num_bytes = packed.shape[1]
        pairs = packed.reshape(-1, self.config.head_dim // 2, 2, num_bytes)
        return pairs.swapaxes(1, 2).reshape(-1, num_bytes)

    def _numbers(self, name: str, packed: U8) -> F32:
        kind = self.file.tensors[name].kind
        try:
            return numbers_of(packed, kind)
        except NotImplementedError:
            raise LoadFailed(f"{self.path}: {name} is stored as {kind.name}, which can't be read") from None
