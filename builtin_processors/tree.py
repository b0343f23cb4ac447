"""Tree decoding: restricts an output to the paths of a tree of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, PlainValidator

from logitship.builtin_processors.parts.row_edits import keep_only
from logitship.builtin_processors.parts.state_history import StateHistory
from logitship.builtin_processors.trees.token_tree import (
    DEFAULT_END_TOKEN_ID,
    DEFAULT_SEP,
    DEFAULT_START_TOKEN_ID,
    Place,
    TokenTree,
)
from logitship.builtin_processors.trees.token_tree_format import read_tree
from logitship.sampler.allowed_tokens import AllowedTokens, mask_of

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams, shown


class InlineTree(BaseModel):  # only for the JSON schema; parsed by `read_tree`
    """A tree, in the format of the tree files."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    prefix_dict: dict[str, list[int]]
    """The tokens that may follow, by path. A path is the start token and the output tokens, joined with `sep`."""
    start_token_id: int = DEFAULT_START_TOKEN_ID
    """The first part of every path."""
    end_token_id: int = DEFAULT_END_TOKEN_ID
    """The token that ends a sequence."""
    sep: str = DEFAULT_SEP
    """The separator between the tokens of a path."""


_MAX_SEP = 16
_FEW = 256
"""Allowed tokens that are listed; more take less time as a mask."""
_EXPECTED = "the name of a tree, or an object with prefix_dict"


def _check_tree(value: object) -> str | TokenTree:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {_EXPECTED}, got {shown(value)}")
    # Optional in a file. In a request it must be a mistake, which would go unnoticed, because the text would be empty.
    if "prefix_dict" not in value:
        raise ValueError("prefix_dict: missing, expected an object of the tokens that may follow each path")
    sep = value.get("sep")
    if isinstance(sep, str) and len(sep) > _MAX_SEP:  # each step builds a path
        raise ValueError(f"sep: expected at most {_MAX_SEP} characters, got {len(sep)}")
    tree = read_tree(value)
    if tree.start.path not in tree:  # a similar mistake
        raise ValueError(
            f"prefix_dict: expected a path {tree.start.path!r}, where every sequence starts; it is the start_token_id"
        )
    return tree


class TreeParams(ProcessorParams):
    """See `TreeLogitsProcessor`."""

    tree: Annotated[
        str | TokenTree,
        PlainValidator(_check_tree, json_schema_input_type=str | InlineTree),
        Expects(_EXPECTED),
    ]
    """Name of a tree that the server loaded at startup, or a tree."""


class TreeLogitsProcessor(BuiltinProcessor):
    """Allows only the tokens that keep a row's output on a path of its tree; sets all others to -inf.

    RTP-LLM's `TreeLogitsProcessor`, with a tree per request. It differs in two points. An EOS token with id 0 works
    like any other; in RTP-LLM, the sequence then never leaves the start. If the model has none of the candidates, the
    EOS token is allowed; in RTP-LLM, no token is.

    Args:
        trees: trees that a request can use by name.
    """

    name = "tree"
    Params = TreeParams
    example: ClassVar[Mapping[str, Any]] = {
        "tree": {"start_token_id": 7, "end_token_id": 1, "prefix_dict": {"7": [3, 4], "7_3": [3, 4], "7_3_4": [5]}}
    }
    is_mask = True

    def __init__(self, trees: Mapping[str, TokenTree] | None = None) -> None:
        self._trees = dict(trees or {})

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> TokenTree:
        """Return the request's tree.

        Raises:
            ValueError: the tree is malformed, or no tree has this name.
        """
        wanted = super().prepare(params, model).tree
        tree = self._trees.get(wanted) if isinstance(wanted, str) else wanted
        if tree is None:
            loaded = ", ".join(sorted(self._trees)) or "none"
            raise ValueError(f"tree: no tree is named {shown(wanted)}; those that the server loaded: {loaded}")
        return tree

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Mask all rows, in place, with one write."""
        rows = enumerate(custom_param_list or ())
        keep_only(logits, {row: self._allowed(params, logits.shape[-1]) for row, params in rows})
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`."""
        for params, each in zip(param_list, allowed, strict=True):
            vocab_size = params["__req__"].vocab_size
            tokens = self._allowed(params, vocab_size)
            if len(tokens) <= _FEW:
                each.keep(tokens.tolist())
            else:
                each.keep_mask(mask_of(tokens, vocab_size))

    def _allowed(self, params: dict[str, Any], vocab_size: int) -> npt.NDArray[np.int64]:
        tree: TokenTree = self.prepared(params)
        request = params["__req__"]
        history: StateHistory[Place] = request.state.setdefault(("tree", tree), StateHistory(tree.start))
        return tree.allowed(history.follow(request.output_ids, tree.advance), vocab_size)
