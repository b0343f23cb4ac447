"""The forward pass of Llama-like models on a CPU, with fewer and larger operations than transformers' own code.

For a few tokens, a decoder layer of transformers is about fifty operations on small tensors, and seven separate
matrices. Here it is four multiplications with packed weights, two of which also add the residual, and about fifteen
small operations. The weights of each norm are folded into the following matrix. The model's embedding and rotary
positions are used unchanged. The weights are packed for oneDNN, in huge pages.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedConfig, PreTrainedModel

from logitship.sampler.huge_pages import collapse

from .attention import StepLayout, attend, layer_index

_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")

# oneDNN compiles each multiplication for each number of rows and caches 1,024 of them, which takes 0.7 GB. 128 cover
# the usual numbers of rows; an evicted one takes 1 ms to compile. oneDNN and PyTorch's layer over it each have a cache,
# and read its capacity at their first multiplication.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "128")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packing speeds up such weights here: float32 on a CPU, with PyTorch's oneDNN operators."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
    )


class PackedLinear:
    """Computes `x @ weight.T + bias`, and optionally adds a tensor in the same pass over the result.

    `torch.nn.functional.linear` multiplies a plain matrix. For a few rows, a CPU reads it at half the speed of its
    memory. oneDNN packs the weights once into blocks that fit the CPU's vector registers. PyTorch's compiler uses the
    same operators for frozen weights.

    Args:
        weight: float32 [out, in].
        bias: float32 [out], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = len(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach().contiguous()
        collapse(torch.ops.mkldnn.data_ptr(self._weight), torch.ops.mkldnn._nbytes(self._weight))

    @classmethod
    def of(cls, *layers: nn.Linear, scale: torch.Tensor | None = None) -> PackedLinear:
        """Return one layer that concatenates the outputs of several layers.

        Args:
            layers: the layers, all with a bias or none.
            scale: float32 [in], factors of the input.
        """
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers))
        return cls(weight if scale is None else weight * scale, torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute float32 [rows, in] to [rows, out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product

    def add(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Compute the same plus `other`, float32 [rows, out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, "add")
        return product


_ARCHITECTURES = (
    "llama.LlamaForCausalLM",
    "mistral.MistralForCausalLM",
    "qwen2.Qwen2ForCausalLM",
    "qwen3.Qwen3ForCausalLM",
)
"""Classes in `transformers.models`. They differ in biases, norms of queries and keys, and sliding windows."""


def can_fuse(model: PreTrainedModel) -> bool:
    """Return whether `FusedDecoder` supports the model: a known architecture, unmodified, with silu activations."""
    package = type(model).__module__.rpartition(".")[0]
    family = package.removeprefix("transformers.models.")
    return (
        f"{family}.{type(model).__name__}" in _ARCHITECTURES
        and can_pack(model.device, model.dtype)
        and model.config.hidden_act == "silu"
        and all(_is_plain(each) for each in model.modules())
    )


def packed_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a `FusedDecoder` packs, in addition to those of the model."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))


def _is_plain(module: nn.Module) -> bool:
    """Return False for replaced layers, as quantization and adapters make them, and for modules with hooks."""
    is_original = type(module) in (nn.Linear, nn.Embedding) or type(module).__module__.startswith(
        ("transformers.", "torch.")
    )
    is_float32 = all(
        type(parameter) is nn.Parameter and parameter.dtype == torch.float32
        for parameter in module.parameters(recurse=False)
    )
    return is_original and is_float32 and not module._forward_hooks and not module._forward_pre_hooks


class FusedDecoder:
    """The fused layers of a model. The model itself does not change and can still be used.

    Args:
        model: a model for which `can_fuse` is true.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.model
        self._embed = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        self._layers = [FusedLayer(layer, model.config) for layer in decoder.layers]
        self._norm = _RMSNorm(decoder.norm)
        self._lm_head = PackedLinear.of(model.lm_head, scale=self._norm.weight)
        self._head_layer: nn.Linear = model.lm_head

    def forward(self, token_ids: torch.Tensor, step: StepLayout, keep: torch.Tensor) -> FusedLogits:
        """Compute the tokens of a step.

        Args:
            token_ids: int64 [tokens], packed as in `step`.
            step: layout of the forward pass.
            keep: int64 [any], the tokens whose logits are returned.
        """
        hidden: torch.Tensor = self._embed(token_ids)
        rotation = _Rotation(*self._rotary(hidden[None], step.positions[None]))
        for layer in self._layers:
            hidden = layer(hidden, rotation, step)
        return FusedLogits(self._norm(hidden[keep]), self._norm.weight, self._lm_head, self._head_layer)


class FusedLogits:
    """`OutputLogits` of a `FusedDecoder`.

    Args:
        hidden: float32 [tokens, in], normalized, without the weights of the norm.
        scale: float32 [in], these weights.
        packed: the LM head, with these weights.
        layer: the LM head, without them.
    """

    def __init__(self, hidden: torch.Tensor, scale: torch.Tensor, packed: PackedLinear, layer: nn.Linear) -> None:
        self._hidden = hidden
        self._scale = scale
        self._packed = packed
        self._layer = layer

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """See `OutputLogits`."""
        if begin == end:
            return self._hidden.new_empty(0, self._packed.out_features)
        return self._packed(self._hidden[begin:end])

    @torch.no_grad()
    def some(self, places: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `OutputLogits`."""
        hidden = self._hidden[places] * self._scale
        logits = torch.einsum("ni,ni->n", hidden, self._layer.weight[token_ids])
        return logits if self._layer.bias is None else logits + self._layer.bias[token_ids]


class FusedLayer:
    """One decoder layer."""

    def __init__(self, layer: Any, config: PreTrainedConfig) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = layer_index(attention)
        self._scaling = attention.scaling
        self._num_heads = config.num_attention_heads
        self._num_rotated = config.num_attention_heads + config.num_key_value_heads
        self._head_dim = attention.head_dim
        self._window = _window(attention, config)
        self._input_norm = _RMSNorm(layer.input_layernorm)
        self._qkv = PackedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj, scale=self._input_norm.weight)
        self._head_norm = _HeadNorm(attention, config) if hasattr(attention, "q_norm") else None
        self._output = PackedLinear.of(attention.o_proj)
        self._mlp_norm = _RMSNorm(layer.post_attention_layernorm)
        self._gate_up = PackedLinear.of(mlp.gate_proj, mlp.up_proj, scale=self._mlp_norm.weight)
        self._down = PackedLinear.of(mlp.down_proj)

    def __call__(self, hidden: torch.Tensor, rotation: _Rotation, step: StepLayout) -> torch.Tensor:
        """Compute float32 [tokens, hidden size] to the same shape."""
        hidden = self._output.add(self._attend(self._input_norm(hidden), rotation, step), hidden)
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return self._down.add(silu(gate).mul_(up), hidden)

    def _attend(self, hidden: torch.Tensor, rotation: _Rotation, step: StepLayout) -> torch.Tensor:
        """Compute float32 [tokens, hidden size] to [tokens, heads * head size]."""
        heads = self._qkv(hidden).view(len(hidden), -1, self._head_dim)
        rotated, value = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        if self._head_norm is not None:
            rotated = self._head_norm(rotated)
        rotated = rotation(rotated)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        return attend(self._index, query, key, value, step, self._scaling, self._window).reshape(len(hidden), -1)


class _Rotation:
    """Rotary positions, RoPE (Su et al., 2021), of the tokens of a step: the same in all layers.

    Args:
        cos: float32 [1, tokens, head size].
        sin: as `cos`.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        first, second = sin[0].chunk(2, dim=-1)
        self._cos = cos[0, :, None]
        self._sin = torch.cat([-first, second], dim=-1)[:, None]  # the sign of `rotate_half`, applied here

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate float32 [tokens, heads, head size]."""
        halves_swapped = heads.view(*heads.shape[:-1], 2, -1).flip(-2).view(heads.shape)
        return torch.addcmul(heads * self._cos, halves_swapped, self._sin)


class _RMSNorm:
    """Root mean square normalization (Zhang and Sennrich, 2019) without its weights: the next matrix contains them."""

    def __init__(self, norm: Any) -> None:
        self.weight: torch.Tensor = norm.weight.detach()
        self._eps = norm.variance_epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight.shape, None, self._eps)


class _HeadNorm:
    """The norms of Qwen3's queries and keys, in one operation."""

    def __init__(self, attention: Any, config: PreTrainedConfig) -> None:
        query, key = attention.q_norm, attention.k_norm
        counts = config.num_attention_heads, config.num_key_value_heads
        self._weight = torch.cat(
            [norm.weight.detach().expand(n, -1) for norm, n in zip((query, key), counts, strict=True)]
        )
        self._eps = query.variance_epsilon

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return rms_norm(heads, heads.shape[-1:], None, self._eps) * self._weight


def _window(attention: Any, config: PreTrainedConfig) -> int | None:
    """Return the sliding window of a layer: each Qwen layer has its own or none, Mistral has one, Llama none."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    return config.sliding_window if config.model_type == "mistral" else None
