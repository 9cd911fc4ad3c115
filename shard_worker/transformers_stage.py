"""Runs a layer range by the `transformers` library's own modelling code, with our attention over paged KV.

The library's forward pass goes through all its layers: those of other stages are stand-ins that pass on
what they get, the first of them hands in what the previous stage sent, and the first after ours takes what
the next stage gets. So nothing of a model is written again here, whatever it does before, between and after
its layers. What can't work that way is found by a trial when the stage is made, and refused.
"""

from typing import Any

import numpy as np
import torch

from shard_worker.attention.interface import Attention, LayerKv, StepAttention
from shard_worker.executor import I64, LoadFailed, StepInputs
from shard_worker.hf_dir import HfCheckpoint
from shard_worker.kv_tensors import KvForm, allocate
from shard_worker.model.layers import Precision
from shard_worker.model.stage import NO_BYTES, StageMemory
from shard_worker.probe import ProbeRow, probe_inputs
from shard_worker.transformers_config import empty_model, first_line, layers_of, library, read_config

ATTENTION = "shoal_paged"  # the library's name for ours
PORT = "shoal_port"  # attribute of every module within a layer: where its attention goes
UNUSED = ("rotary_emb.inv_freq",)  # ends of names that old files keep beside the weights
# What models hand to attention and paged attention has no use for.
IDLE = ("dropout", "is_causal", "position_ids", "cache", "use_cache", "cache_position", "output_attentions")
TRIAL_TOKENS = 2


class TransformersStage:
    def __init__(
        self,
        checkpoint: HfCheckpoint,
        first_layer: int,
        end_layer: int,
        precision: Precision,
        attention: Attention,
    ) -> None:
        """Raises LoadFailed."""
        self._first, self._end, self._precision = first_layer, end_layer, precision
        self._attention, self._sizes = attention, checkpoint.config
        hf_config = read_config(checkpoint.path)
        _register()
        self._model = empty_model(hf_config, precision.compute, ATTENTION, "cpu")
        self._body = getattr(self._model, self._model.base_model_prefix)
        layers = layers_of(self._model)
        self._last = end_layer == len(layers)
        self._gate = _Gate()
        self._ports = [_Port(self, i, _window_of(hf_config, i)) for i in range(first_layer, end_layer)]
        for i in range(len(layers)):
            if first_layer <= i < end_layer:
                self._install(layers[i], self._ports[i - first_layer])
            else:
                layers[i] = _StandIn(self._gate, enters=i == 0, leaves=i == end_layer)
        self._load(checkpoint, layers)
        # The head is the library's too, over whatever rows we hand it.
        setattr(self._model, self._model.base_model_prefix, _Echo())
        self._memory: StageMemory | None = None
        self._step: StepAttention | None = None
        self._hidden = torch.empty(0)
        self._try_out()

    def _install(self, layer: Any, port: "_Port") -> None:
        for module in layer.modules():
            setattr(module, PORT, port)
        layer.register_forward_hook(self._after_layer)

    def _after_layer(self, _module: Any, _inputs: Any, output: Any) -> Any:
        """Hidden states are rounded to the stored type after each layer, wherever the model is cut."""
        if not isinstance(output, torch.Tensor):
            raise LoadFailed("its layers return more than hidden states")
        if self._precision.dtype == self._precision.compute:
            return output
        return output.to(self._precision.dtype).to(self._precision.compute)

    @property
    def num_kv_heads(self) -> int:
        return self._sizes.num_kv_heads

    # ---- weights -----------------------------------------------------------------------------------------

    def _load(self, checkpoint: HfCheckpoint, layers: Any) -> None:
        """Every weight that this stage's share of the forward pass reads. Raises LoadFailed."""
        model, first = self._model, self._first == 0
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = model.config.tie_word_embeddings
        if tied:
            head.weight = embedding.weight
        names = {id(module): name for name, module in model.named_modules()}
        for name, module in model.named_modules():
            if module is embedding and not (first or (tied and self._last)):
                module.weight.data = torch.empty(0)
                continue
            if module is head and tied:
                continue
            if not self._last and not name.startswith(model.base_model_prefix):
                continue
            self._fill(checkpoint, name, module)
        for i in range(self._first, self._end):
            _refuse_unread(checkpoint, names[id(layers[i])], layers[i])

    def _fill(self, checkpoint: HfCheckpoint, prefix: str, module: Any) -> None:
        own = [(name, weight) for name, weight in module.named_parameters(recurse=False)]
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        own += [(name, module._buffers[name]) for name in sorted(kept) if module._buffers[name] is not None]
        for name, weight in own:
            read = checkpoint.tensor(f"{prefix}.{name}".lstrip("."), tuple(weight.shape))
            if weight.is_floating_point():
                read = read.to(self._precision.dtype).to(weight.dtype)
            weight.data = read

    # ---- a step ------------------------------------------------------------------------------------------

    def attach(self, memory: StageMemory) -> None:
        assert len(memory.kv) == self._end - self._first
        self._memory = memory
        row_bytes = self._sizes.hidden_size * self._precision.dtype.itemsize
        self._received = torch.empty(memory.step_tokens_max * row_bytes, dtype=torch.uint8)
        self._sent = torch.empty(memory.step_tokens_max * row_bytes, dtype=torch.uint8)

    def release(self) -> None:
        self._memory = None

    def run(self, inputs: StepInputs, activations: memoryview, wanted: I64 | None = None) -> memoryview:
        assert self._memory is not None, "run before attach"
        dtype, compute = self._precision.dtype, self._precision.compute
        shape = (1, len(inputs.token_ids), self._sizes.hidden_size)
        self._step = self._attention.step(inputs, self._memory.block_size_tokens)
        with torch.inference_mode():
            positions = torch.from_numpy(inputs.positions.astype(np.int64))[None]
            if self._first == 0:
                start = {"input_ids": torch.from_numpy(inputs.token_ids.astype(np.int64))[None]}
            else:
                num_bytes = shape[1] * shape[2] * dtype.itemsize
                assert activations.nbytes == num_bytes
                self._received.numpy()[:num_bytes] = np.frombuffer(activations, np.uint8)
                self._gate.entering = self._received[:num_bytes].view(dtype).view(shape).to(compute)
                start = {"inputs_embeds": torch.zeros(shape, dtype=compute)}
            out = self._body(**start, position_ids=positions, use_cache=False)
            if self._last:
                self._hidden = out.last_hidden_state[0]
                return NO_BYTES
            sent = self._sent[: shape[1] * shape[2] * dtype.itemsize]
            sent.view(dtype).view(shape).copy_(self._gate.taken())
            return sent.numpy().data

    def logits(self, tokens: I64) -> torch.Tensor:
        with torch.inference_mode():
            rows = self._hidden.index_select(0, torch.from_numpy(tokens))
            logits: torch.Tensor = self._model(inputs_embeds=rows[None], use_cache=False).logits[0]
            return logits

    def attend(self, port: "_Port", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        assert self._memory is not None and self._step is not None
        kv: LayerKv = self._memory.kv[port.layer - self._first]
        port.calls += 1
        return self._step.attend(q, k, v, kv, **options)

    def _try_out(self) -> None:
        """Two tokens through the stage and its head: every layer must attend once. Raises LoadFailed."""
        kv = allocate(self._sizes, self._end - self._first, 1, TRIAL_TOKENS, KvForm(self._precision.compute))
        self.attach(StageMemory(kv, TRIAL_TOKENS, TRIAL_TOKENS))
        inputs = probe_inputs([ProbeRow([0] * TRIAL_TOKENS, 0, [0])], TRIAL_TOKENS)
        row_bytes = self._sizes.hidden_size * self._precision.dtype.itemsize
        zeros = NO_BYTES if self._first == 0 else memoryview(bytes(TRIAL_TOKENS * row_bytes))
        kind = self._model.config.model_type
        try:
            self.run(inputs, zeros)
            if self._last and self.logits(np.array([1], np.int64)).shape != (1, self._sizes.vocab_size):
                raise LoadFailed("its head gives something else than logits")
        except LoadFailed as error:
            raise LoadFailed(f"model_type {kind!r} can't be served: {error}") from None
        except Exception as error:  # whatever the library's code raises when used like this
            raise LoadFailed(f"model_type {kind!r} can't be served: {first_line(error)}") from None
        if any(port.calls != 1 for port in self._ports):
            raise LoadFailed(f"model_type {kind!r} can't be served: it has layers without attention")
        self._memory = None


def _refuse_unread(checkpoint: HfCheckpoint, prefix: str, layer: Any) -> None:
    """A tensor that the library's layer doesn't know would change the numbers. Raises LoadFailed."""
    known = {f"{prefix}.{name}" for name in layer.state_dict()}
    for name in checkpoint.names_under(f"{prefix}."):
        if name not in known and not name.endswith(UNUSED):
            raise LoadFailed(f"{checkpoint.path}: {name} has no meaning to transformers")


def _window_of(config: Any, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer] == "sliding_attention":
        return int(config.sliding_window)
    return None


# ---- what the library's forward pass meets ----------------------------------------------------------


class _Port:
    """Where the attention of one layer goes."""

    def __init__(self, stage: TransformersStage, layer: int, window: int | None) -> None:
        self.stage, self.layer, self.window, self.calls = stage, layer, window, 0
        self.num_kv_heads = stage.num_kv_heads


class _Gate:
    """What enters before a stage's first layer and leaves after its last."""

    def __init__(self) -> None:
        self.entering: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None

    def taken(self) -> torch.Tensor:
        leaving, self.leaving = self.leaving, None
        assert leaving is not None, "the forward pass went around the layers"
        return leaving


class _StandIn(torch.nn.Module):
    """For a layer of another stage."""

    def __init__(self, gate: _Gate, *, enters: bool, leaves: bool) -> None:
        super().__init__()
        self.gate, self.enters, self.leaves = gate, enters, leaves

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.enters:
            assert self.gate.entering is not None
            hidden_states, self.gate.entering = self.gate.entering, None
        if self.leaves:
            self.gate.leaving = hidden_states
        return hidden_states


class _Echo(torch.nn.Module):
    """For the body, once it has run: gives its own input as the last hidden states."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        outputs = library().modeling_outputs.BaseModelOutputWithPast
        return outputs(last_hidden_state=inputs_embeds)


def _register() -> None:
    library().AttentionInterface.register(ATTENTION, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: object,
) -> tuple[torch.Tensor, None]:
    """In the library's shapes: [1, heads, T, head_dim], to [1, T, heads, head_dim]. Raises LoadFailed."""
    port: _Port = getattr(module, PORT)
    strange = [name for name, value in rest.items() if value is not None and name not in IDLE]
    if strange or attention_mask is not None:
        raise LoadFailed(f"its attention wants {(strange or ['a mask'])[0]}")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise LoadFailed("its keys and values differ in size")
    if key.shape[1] != port.num_kv_heads:
        raise LoadFailed(f"it has {key.shape[1]} KV heads, where its configuration says {port.num_kv_heads}")
    window = port.window if sliding_window is None else sliding_window
    attended = port.stage.attend(
        port,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        window=window,
    )
    return attended.view(1, query.shape[2], query.shape[1], query.shape[3]), None
