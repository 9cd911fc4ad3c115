"""A model without weights that knows its own answers: numbers that prove the paging right.

Every layer keeps one 64-bit word per cached position and mixes, for each new token, a weighted sum of
all words of its sequence *as read back through the block table*. A wrong block, a stale one, a lost
prefix or a mixed-up slot therefore changes the tokens; `oracle` computes them from the plain list. With
penalties they depend on what was counted, too: a lost or a double count changes them.
The result does not depend on how layers are split over stages. The vocabulary: ids 0-255 are the bytes,
256 ends a sequence, the rest are pairs of bytes, so that code points arrive split.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from chassis.messages.card import ModelCard, TokenBytes, build_card
from chassis.messages.sampling import TokenLogprobs
from shard_worker.executor import (
    I64,
    U32,
    U64,
    Loaded,
    LoadFailed,
    LogprobColumns,
    ModelFacts,
    Pages,
    ShapingColumns,
    StageSpec,
    StepInputs,
    StepOutput,
)
from shard_worker.fake_vocabulary import CHOICES, EOS_TOKEN, choices_of
from shard_worker.fake_vocabulary import EOS_ID as EOS_ID
from shard_worker.fake_vocabulary import TOKEN_BYTES as TOKEN_BYTES
from shard_worker.fake_vocabulary import VOCAB_SIZE as VOCAB_SIZE
from shard_worker.fake_vocabulary import tokenizer_json as tokenizer_json
from shard_worker.grammar_masks import NO_MASKS, GrammarMasks, masks_of
from shard_worker.kv_pages import HostPages
from shard_worker.last_sampled import LastSampled
from shard_worker.prompt_asks import places_of

NAME = "fake"
NUM_LAYERS = 8
ACTIVATION_BYTES = 8
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """Costs are what one run takes on the compute thread: seconds per step plus seconds per token."""

    name: str = NAME
    num_layers: int = NUM_LAYERS
    num_blocks: int = 4096
    context_len_max: int = 4096
    step_cost_s: float = 0.0
    token_cost_s: float = 0.0
    layer_cost_s: float = 0.0  # beside that, of each layer of the stage
    layers_max: int = 0  # there is memory for; 0: for all
    poison_id: int | None = None  # a token that makes a run fail
    nan_id: int | None = None  # a token behind which logits are no numbers


def _digest(config: FakeConfig) -> str:
    return hashlib.sha256(f"shoal fake model 1\0{config.name}\0{config.num_layers}".encode()).hexdigest()


@cache
def card_of(config: FakeConfig) -> bytes:
    return build_card(
        ModelCard(
            name=config.name,
            model_digest=_digest(config),
            config_json=json.dumps({"model_type": "fake", "num_hidden_layers": config.num_layers}),
            vocab_size=VOCAB_SIZE,
            num_layers=config.num_layers,
            context_len_max=config.context_len_max,
            eos_ids=(EOS_ID,),
            tokenizer_json=tokenizer_json(),
            chat_template=CHAT_TEMPLATE,
            bos_token="",
            eos_token=EOS_TOKEN,
            token_bytes=TokenBytes.of(TOKEN_BYTES),
        )
    )


# ---- the arithmetic, once in plain numbers and once in columns --------------------------------------


def _mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = ((x ^ (x >> 30)) * _MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL_2) & _MASK
    return x ^ (x >> 31)


def _odd(position: int) -> int:
    return (_GOLDEN * (2 * position + 1)) & _MASK | 1


def _layer_salt(layer: int) -> int:
    return _mix(layer + 1)


def next_token(
    activation: int, seed: int, temperature: float, output_index: int, seen: int = 0, choices: U32 = CHOICES
) -> int:
    """The token that follows the position whose last layer gave `activation`; greedy ignores the seed.
    `seen`: of a request with penalties, `seen_word` of each id so far, added up."""
    h = _mix(activation ^ _GOLDEN ^ seen)
    if temperature > 0:
        h = _mix(h ^ _mix(seed ^ (_GOLDEN * (output_index + 1) & _MASK)))
    return int(choices[(h >> 52) % len(choices)])


def seen_word(token_id: int, times: int) -> int:
    """Of an id in prompt or output, that is so often in the output."""
    return _mix((token_id * _GOLDEN + times + 1) & _MASK)


def logprobs_of(token_id: int, top: int) -> TokenLogprobs:
    """What the model says it thinks of an id."""
    likeliest = tuple((token_id + i) % VOCAB_SIZE for i in range(top))
    return TokenLogprobs(-token_id / 8, 1 + token_id % 5, likeliest, tuple(-i / 8 for i in likeliest))


def _seen(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
    ids = dict.fromkeys((*prompt_ids, *output_ids))
    return sum(seen_word(token_id, output_ids.count(token_id)) for token_id in ids) & _MASK


def oracle(
    prompt_ids: Sequence[int],
    seed: int,
    temperature: float,
    n: int,
    num_layers: int = NUM_LAYERS,
    penalised: bool = False,
    choices_of: Callable[[Sequence[int]], U32] = lambda ids: CHOICES,
) -> list[int]:
    """The first `n` output ids (an end of sequence does not stop it), from the plain list of ids.
    `penalised`: the request has a repetition penalty; `choices_of`: what may follow these, if any."""
    sums = [0] * num_layers
    ids: list[int] = []
    for position in range(len(prompt_ids) + n - 1):
        token = prompt_ids[position] if position < len(prompt_ids) else ids[-1]
        activation = _through(token, position, sums)
        if position >= len(prompt_ids) - 1:
            seen = _seen(prompt_ids, ids) if penalised else 0
            choices = choices_of(ids)
            if not len(choices):
                break
            ids.append(next_token(activation, seed, temperature, len(ids), seen, choices))
    return ids


def _through(token: int, position: int, sums: list[int]) -> int:
    """The last layer's activation of a token; `sums`: what each layer has read so far."""
    activation = _mix(token + 1)
    for layer in range(len(sums)):
        sums[layer] = (sums[layer] + activation * _odd(position)) & _MASK
        activation = _mix((activation + sums[layer] + _layer_salt(layer)) & _MASK)
    return activation


def prompt_oracle(prompt_ids: Sequence[int], top: int, num_layers: int = NUM_LAYERS) -> list[TokenLogprobs]:
    """What is told of a prompt's ids after the first: it depends on all before."""
    sums = [0] * num_layers
    activations = [_through(token, position, sums) for position, token in enumerate(prompt_ids[:-1])]
    return [prompt_logprobs_of(x, i, top) for x, i in zip(activations, prompt_ids[1:], strict=True)]


def prompt_logprobs_of(activation: int, token_id: int, top: int) -> TokenLogprobs:
    """Of the id that follows the place with this activation."""
    return logprobs_of(token_id, top)._replace(logprob=-(_mix(activation ^ token_id) % 4096) / 8)


def _mix_columns(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MUL_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MUL_2)
    return x ^ (x >> np.uint64(31))


def _odd_columns(positions: I64) -> U64:
    twice = positions.astype(np.uint64) * np.uint64(2) + np.uint64(1)
    return np.uint64(_GOLDEN) * twice | np.uint64(1)


def _sample_columns(activations: U64, inputs: StepInputs, masks: GrammarMasks) -> NDArray[np.uint32]:
    seen = np.uint64(0) if inputs.shaping is None else _seen_columns(inputs.shaping, len(activations))
    h = _mix_columns(activations ^ np.uint64(_GOLDEN) ^ seen)
    index = inputs.output_index.astype(np.uint64) + np.uint64(1)
    drawn = _mix_columns(h ^ _mix_columns(inputs.seeds ^ np.uint64(_GOLDEN) * index))
    h = np.where(inputs.temperature > 0, drawn, h)
    places = (h >> np.uint64(52)).astype(np.int64)
    token_ids = CHOICES[places]
    for row, mask in masks.rows:
        choices = choices_of(mask)
        token_ids[row] = choices[places[row] % len(choices)]
    return token_ids


def _seen_columns(shaping: ShapingColumns, num_rows: int) -> U64:
    words = shaping.seen_ids.astype(np.uint64) * np.uint64(_GOLDEN)
    words = _mix_columns(words + shaping.seen_counts.astype(np.uint64) + np.uint64(1))
    seen = np.zeros(num_rows, np.uint64)
    np.add.at(seen, shaping.penalty_rows.repeat(shaping.seen_lens), words)
    return seen


def _logprob_columns(token_ids: NDArray[np.uint32], shaping: ShapingColumns) -> LogprobColumns | None:
    if not len(shaping.logprob_rows):
        return None
    rows, tops = shaping.logprob_rows.tolist(), shaping.top_logprobs.tolist()
    told = [logprobs_of(int(token_ids[row]), top) for row, top in zip(rows, tops, strict=True)]
    return _columns(shaping.logprob_rows, told)


def _prompt_columns(x: U64, inputs: StepInputs, nan_id: int | None) -> LogprobColumns:
    places, following, tops = places_of(inputs)
    rows = zip(x[places].tolist(), following.tolist(), tops.tolist(), strict=True)
    told = [prompt_logprobs_of(*row) for row in rows]
    nan = inputs.token_ids[places] == nan_id
    return _columns(
        places, [e._replace(logprob=math.nan) if n else e for e, n in zip(told, nan, strict=True)]
    )


def _columns(places: I64, told: Sequence[TokenLogprobs]) -> LogprobColumns:
    return LogprobColumns(
        places=places,
        logprobs=np.array([entry.logprob for entry in told], np.float32),
        ranks=np.array([entry.rank for entry in told], np.int64),
        top_lens=np.array([len(entry.top_ids) for entry in told], np.int64),
        top_ids=np.array([i for entry in told for i in entry.top_ids], np.int64),
        top_logprobs=np.array([x for entry in told for x in entry.top_logprobs], np.float32),
    )


class FakeExecutor:
    """An `Executor`. The memory of a layer is one word per block position, garbage until written."""

    def __init__(self, config: FakeConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        self._config = config
        self._sleep = sleep
        self._spec: StageSpec | None = None
        self._memory: U64 = np.empty((0, 0), np.uint64)
        self._allocations = 0
        self._last_sampled = LastSampled(0)
        self._facts = ModelFacts(
            name=config.name,
            digest=_digest(config),
            num_layers=config.num_layers,
            head_cost_layers=1.0,
            activation_bytes=ACTIVATION_BYTES,
            context_len_max=config.context_len_max,
            card=card_of(config),
            layer_us=config.layer_cost_s * 1e6,
            layers_max=config.layers_max,
        )

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def pages(self) -> Pages | None:
        spec = self._spec
        if spec is None:
            return None
        words = self._memory.reshape(len(self._memory), -1, 1, spec.block_size_tokens)
        return HostPages(f"words.{spec.block_size_tokens}", words.view(np.uint8))

    def load(self, spec: StageSpec) -> Loaded:
        """Raises LoadFailed for layers the model does not have."""
        if not 0 <= spec.first_layer < spec.end_layer <= self._config.num_layers:
            raise LoadFailed(f"layers {spec.first_layer} to {spec.end_layer} of {self._config.num_layers}")
        num_layers = spec.end_layer - spec.first_layer
        if self._config.layers_max and num_layers > self._config.layers_max:
            raise LoadFailed(f"{num_layers} layers: there is memory for {self._config.layers_max}")
        old = self._spec
        kept = old is not None and (old.first_layer, old.end_layer, old.block_size_tokens) == (
            spec.first_layer,
            spec.end_layer,
            spec.block_size_tokens,
        )
        self._spec = spec
        self._last_sampled = LastSampled(spec.slots_max)
        if not kept:
            self._allocations += 1
            shape = (spec.end_layer - spec.first_layer, self._config.num_blocks * spec.block_size_tokens)
            garbage = np.arange(shape[0] * shape[1], dtype=np.uint64) + np.uint64(self._allocations << 48)
            self._memory = _mix_columns(garbage).reshape(shape)
        return Loaded(num_blocks=self._config.num_blocks, kv_allocated=not kept)

    def copy_blocks(self, sources: U32, targets: U32) -> None:
        assert self._spec is not None, "copy before load"
        words = self._memory.reshape(len(self._memory), -1, self._spec.block_size_tokens)
        words[:, targets] = words[:, sources]

    def run(self, inputs: StepInputs, activations: memoryview) -> StepOutput:
        spec = self._spec
        assert spec is not None, "run before load"
        config = self._config
        cost_s = config.step_cost_s + config.token_cost_s * len(inputs.token_ids)
        cost_s += config.layer_cost_s * (spec.end_layer - spec.first_layer)
        if cost_s > 0:
            self._sleep(cost_s)
        inputs = self._last_sampled.known(inputs)
        if config.poison_id is not None and bool(np.any(inputs.token_ids == config.poison_id)):
            raise RuntimeError("poisoned token")
        if spec.stage == 0:
            x = _mix_columns(inputs.token_ids.astype(np.uint64) + np.uint64(1))
        else:
            x = np.frombuffer(activations, np.dtype("<u8")).astype(np.uint64)
        assert len(x) == len(inputs.token_ids), "one activation a token"
        x = self._forward(inputs, x, spec)
        if spec.stage + 1 < spec.num_stages:
            return StepOutput(memoryview(x.astype("<u8").tobytes()), np.empty(0, np.uint32))
        last = inputs.row_offsets[inputs.sample_rows + 1] - 1
        masks = NO_MASKS if inputs.shaping is None else masks_of(inputs.shaping.grammars)
        token_ids = _sample_columns(x[last], inputs, masks)
        self._last_sampled.keep(inputs, token_ids)
        told = None if inputs.shaping is None else _logprob_columns(token_ids, inputs.shaping)
        prompts = _prompt_columns(x, inputs, config.nan_id) if inputs.prompt_asks else None
        nan_rows = tuple(np.flatnonzero(inputs.token_ids[last] == config.nan_id).tolist())
        undrawn = masks.waiting_rows, masks.refused_rows
        return StepOutput(memoryview(b""), token_ids, told, prompts, nan_rows, *undrawn)

    def _forward(self, inputs: StepInputs, x: U64, spec: StageSpec) -> U64:
        """x: [T]. Writes each layer's words, then reads every row's whole prefix through its table."""
        block_size = spec.block_size_tokens
        lens = inputs.context_lens.astype(np.int64)
        ends = np.cumsum(lens)
        begins = ends - lens
        rows = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(len(rows), dtype=np.int64) - begins[rows]
        blocks = inputs.block_tables[rows, positions // block_size].astype(np.int64)
        places = blocks * block_size + positions % block_size
        weights = _odd_columns(positions)
        token_rows = np.repeat(np.arange(len(lens)), np.diff(inputs.row_offsets))
        at = begins[token_rows] + inputs.positions  # each new token's place among the words read
        sums = np.zeros(len(rows) + 1, np.uint64)
        for i in range(spec.end_layer - spec.first_layer):
            memory = self._memory[i]
            memory[inputs.kv_slots] = x
            np.cumsum(memory[places] * weights, out=sums[1:])
            prefix = sums[at + 1] - sums[begins[token_rows]]
            x = _mix_columns(x + prefix + np.uint64(_layer_salt(spec.first_layer + i)))
        return x
