"""Makes a model compute each token as if it were alone, to the last bit.

Libraries for matrices choose their kernel, and the order of its additions, by the number of rows that they are given.
Vectorized functions compute what is left over at the end of their input, or of a thread's share of it, with other
instructions that round differently. So the bits of a row depend on how many rows there are, and where it stands among
them: on the other requests, on the chunks of a prompt, on drafts.

Here every module that computes rows by such means gets a fixed number of rows at a time, and rotary positions are
computed token by token. Attention is a call per token. What a model does besides (additions and products
of single numbers, copies, lookups) rounds each number by itself. `deterministic_check` tries the result out.

The idea, that results do not depend on the batch if every kernel reduces in an order that does not: "Defeating
Nondeterminism in LLM Inference", Horace He and Thinking Machines Lab, 2025.
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

from .attention import layer_index, no_mask, refuse_what_is_not_computed, store
from .step_layout import StepLayout

DETERMINISTIC_ATTENTION_NAME = "logitship_slots_token_by_token"

TILE = 16
"""Rows that a linear layer or a norm computes at a time. Fewer would read the weights more often for a prompt, more
would compute more padding for a single sequence."""

_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules of activation functions. They are computed row by row: in a tile, a row's place would decide which of its
numbers are the ones left over."""

_CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With workspaces of its own for each stream, cuBLAS computes the same bits in every call of the same shape."""


class RowTiles(nn.Module):
    """A module that is given the same number of rows in every call, so that it computes them all in the same way.

    Assumptions:
    * A row is a vector along the last dimension, and the module computes each from itself alone.

    Guarantees:
    * The module sees [size, width] and nothing else. Where rows are missing, they are zeros.
    * A tile begins at an address that the allocator aligned, or at a multiple of `size` rows behind one.
    """

    def __init__(self, module: nn.Module, size: int) -> None:
        super().__init__()
        self.module = module
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] in, [..., the module's width] out."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) == 0:
            empty: torch.Tensor = self.module(x)
            return empty
        padded = rows.new_zeros(len(rows) + -len(rows) % self.size, rows.shape[1])
        padded[: len(rows)] = rows
        computed = torch.cat([self.module(tile) for tile in torch.split(padded, self.size)])
        return computed[: len(rows)].view(*x.shape[:-1], -1)


class TokenByToken(nn.Module):
    """Rotary positions, one token at a time.

    Some of them choose their frequencies by the largest position that they are given: here that is the token's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """As the module's: `position_ids` is int64 [1, tokens], and the results are [1, tokens, any]."""
        of_tokens = [self.module(x, position, *args, **kwargs) for position in torch.split(position_ids, 1, dim=-1)]
        return tuple(torch.cat(parts, dim=-2) for parts in zip(*of_tokens, strict=True))


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
    """Attention that computes each token by itself: its bits depend on its own sequence and position alone.

    `slot_attention` chooses masks and shapes by what else is in a step, and the order of its additions follows. Here
    each token is a call of its own, with one query and exactly the keys that it sees. Its shapes follow from the
    token's position. Several queries in one call would be faster, and are not the same: with two threads and more,
    PyTorch splits the work by how many there are.

    Arguments, results and errors are those of `slot_attention`.
    """
    refuse_what_is_not_computed(others)
    # Contiguous, so that a query's strides do not depend on the number of tokens either.
    queries, new_keys, new_values = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    keys, values = store(layer_index(module), new_keys, new_values, step)
    places = [(s.slot, position) for s in (*step.decode, *step.prefill) for position in range(s.start, s.end)]
    outputs = []
    for token, (slot, position) in enumerate(places):
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
    """Make the function known to transformers under `DETERMINISTIC_ATTENTION_NAME`."""
    AttentionInterface.register(DETERMINISTIC_ATTENTION_NAME, token_by_token_attention)
    AttentionMaskInterface.register(DETERMINISTIC_ATTENTION_NAME, no_mask)


def make_deterministic(model: PreTrainedModel) -> None:
    """Replace modules and the attention function of a model, in place. Its parameters stay what they are.

    Raises:
        UnsupportedModel: a layer computes in a way that is not known to be independent of the other tokens.
    """
    if model.device.type == "cuda":
        os.environ.setdefault(*_CUBLAS_WORKSPACE)
    _register_attention()
    model.set_attn_implementation(DETERMINISTIC_ATTENTION_NAME)
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(owner, RowTiles | TokenByToken):
            continue  # replaced before: the model has served another engine
        replacement = _replacement(module)
        if replacement is not None:
            owner.register_module(child, replacement)
        elif not _is_token_by_token(module):
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be served with --enable-deterministic-inference: {name} is a "
                f"{type(module).__name__}, and only plain linear layers are known to compute each row by itself. "
                "Serve a model that is not quantized and has no experts, or leave the flag out"
            )


def _replacement(module: nn.Module) -> nn.Module | None:
    """What takes a module's place. None: nothing, it stays as it is."""
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
    # Not their subclasses, nor subclasses of Parameter: those are how quantized layers are made.
    return type(module) in (nn.Linear, Conv1D) and all(
        type(parameter) is nn.Parameter and parameter.is_floating_point() for parameter in module.parameters()
    )


def _is_token_by_token(module: nn.Module) -> bool:
    """False where weights of the module's own are multiplied in a way that is not known here."""
    if isinstance(module, nn.Embedding):
        return True
    weights: list[torch.Tensor] = [*module.parameters(recurse=False)]
    if _is_leaf(module):
        weights += module.buffers(recurse=False)  # where quantized layers keep theirs
    return all(weight.dim() < 2 for weight in weights)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None
