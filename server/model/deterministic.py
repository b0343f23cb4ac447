"""Batch-invariant inference: each token's logits are the same to the last bit in every batch.

Matrix libraries choose their kernel, and the order of its additions, by the number of rows. Vectorized functions
compute the remainder at the end of their input, or of a thread's share of it, with other instructions that round
differently. So the bits of a row depend on the number of rows and on its index among them: on the other requests, on
the chunks of a prompt, on drafts.

Here every module that uses such a library gets a fixed number of rows at a time, rotary positions are computed token by
token, and attention is one call per token. The model's other operations (elementwise additions and products, copies,
lookups) round each number by itself. `deterministic_check` tests the result.

The idea of batch-invariant kernels, whose order of reduction does not depend on the batch: "Defeating Nondeterminism in
LLM Inference", Horace He and Thinking Machines Lab, 2025.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from logitship.server.refusals import UnsupportedModel

from .attention import StepLayout, check_supported_arguments, layer_index, no_mask, store

DETERMINISTIC_ATTENTION_NAME = "logitship_slots_token_by_token"

TILE = 16
"""Rows that a linear layer or a norm computes at a time. Fewer would read the weights more often for a prompt, more
would compute more padding for a single sequence."""

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules of activation functions. They are computed row by row: in a tile, a row's index would decide which of its
numbers are in the remainder."""

_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With this workspace configuration, cuBLAS computes the same bits in every call of the same shape."""


class RowTiles(nn.Module):
    """Calls a module with the same number of rows every time, so that it computes all rows in the same way.

    Assumptions:
    * A row is a vector along the last dimension, and the module computes each row independently.

    Guarantees:
    * The module's input is always [size, width], padded with zeros.
    * A tile begins at an address that the allocator aligned, or a multiple of `size` rows after one.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        self.module = module
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., width] to [..., the module's width]."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) == 0:
            empty: torch.Tensor = self.module(x)
            return empty
        padded = rows.new_zeros(len(rows) + -len(rows) % self.size, rows.shape[1])
        padded[: len(rows)] = rows
        computed = torch.cat([self.module(tile) for tile in torch.split(padded, self.size)])
        return computed[: len(rows)].view(*x.shape[:-1], -1)


class TokenByToken(nn.Module):
    """Computes rotary positions one token at a time.

    Some implementations choose their frequencies by the largest position in the call: here that is the token's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Compute as the module does: `position_ids` is int64 [1, tokens], and the results are [1, tokens, any]."""
        per_token = [self.module(x, position, *args, **kwargs) for position in torch.split(position_ids, 1, dim=-1)]
        return tuple(torch.cat(parts, dim=-2) for parts in zip(*per_token, strict=True))


def token_by_token_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: StepLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention token by token: the bits depend on the token's own sequence and position only.

    The masks and shapes of `slot_attention`, and so the order of its additions, depend on the whole step. Here each
    token is one call, with one query and exactly the keys that it attends to, so shapes depend on its position only.
    Several queries per call would be faster, but not the same: with two or more threads, PyTorch splits the work by
    the number of queries.

    Arguments, results and errors are those of `slot_attention`.
    """
    check_supported_arguments(others)
    # Contiguous, so that a query's strides do not depend on the number of tokens.
    queries, new_keys, new_values = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    keys, values = store(layer_index(module), new_keys, new_values, step)
    locations = [(s.slot, position) for s in (*step.decode, *step.prefill) for position in range(s.start, s.end)]
    outputs = []
    for token, (slot, position) in enumerate(locations):
        begin = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
        output = scaled_dot_product_attention(
            queries[token, None, :, None],
            keys[slot, None, :, begin : position + 1],
            values[slot, None, :, begin : position + 1],
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output[:, :, 0])
    return torch.stack(outputs, dim=1), None


def _register_attention() -> None:
    """Register the function with transformers as `DETERMINISTIC_ATTENTION_NAME`."""
    AttentionInterface.register(DETERMINISTIC_ATTENTION_NAME, token_by_token_attention)
    AttentionMaskInterface.register(DETERMINISTIC_ATTENTION_NAME, no_mask)


def make_deterministic(model: PreTrainedModel) -> None:
    """Replace modules and the attention function of a model, in place. Its parameters do not change.

    Raises:
        UnsupportedModel: a layer is not known to compute each token independently.
    """
    if model.device.type == "cuda":
        os.environ.setdefault(*_CUBLAS_WORKSPACE)
    _register_attention()
    model.set_attn_implementation(DETERMINISTIC_ATTENTION_NAME)
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner, RowTiles | TokenByToken):
            continue  # replaced already: the model has served another engine
        replacement = _replacement(module)
        if replacement is not None:
            owner.register_module(child, replacement)
        elif not _is_token_by_token(module):
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be served with --enable-deterministic-inference: {name} is a "
                f"{type(module).__name__}, and only plain linear layers are known to compute each row by itself. "
                "Serve a model that is not quantized and has no experts, or remove the flag"
            )


def _replacement(module: nn.Module) -> nn.Module | None:
    """Return the replacement of a module; None: it stays."""
    if _is_plain_linear(module):
        return RowTiles(module, TILE)
    if type(module).__name__.endswith("RotaryEmbedding"):
        return TokenByToken(module)
    if type(module).__module__ in _ACTIVATIONS and _is_leaf(module):
        return RowTiles(module, 1)
    own = [*module.parameters(recurse=False)]
    if own and _is_leaf(module) and _is_token_by_token(module) and not isinstance(module, nn.Embedding):
        return RowTiles(module, TILE)  # a norm
    return None


def _is_plain_linear(module: nn.Module) -> bool:
    # Not their subclasses, nor subclasses of Parameter: quantized layers are such subclasses.
    return type(module) in (nn.Linear, Conv1D) and all(
        type(parameter) is nn.Parameter and parameter.is_floating_point() for parameter in module.parameters()
    )


def _is_token_by_token(module: nn.Module) -> bool:
    """Return False if the module itself may multiply by weights in an unknown way."""
    if isinstance(module, nn.Embedding):
        return True
    weights: list[torch.Tensor] = [*module.parameters(recurse=False)]
    if _is_leaf(module):
        weights += module.buffers(recurse=False)  # of quantized layers
    return all(weight.dim() < 2 for weight in weights)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None
