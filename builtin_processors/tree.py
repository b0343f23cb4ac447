"""Tree decoding: only paths of a given tree of tokens are generated."""

from __future__ import annotations

from collections.abc import Mapping
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

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams, shown


class InlineTree(BaseModel):  # only for the JSON schema: `read_tree` is what reads it
    """A tree, in the format of the tree files."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    prefix_dict: dict[str, list[int]]
    """Of each path, the tokens that may follow. A path is the start token and the tokens since, with `sep` between."""
    start_token_id: int = DEFAULT_START_TOKEN_ID
    """The first part of every path."""
    end_token_id: int = DEFAULT_END_TOKEN_ID
    """The token that ends a sequence."""
    sep: str = DEFAULT_SEP
    """What stands between the tokens of a path."""


_MAX_SEP = 16
_EXPECTED = "the name of a tree, or an object with prefix_dict"


def _check_tree(value: object) -> str | TokenTree:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {_EXPECTED}, got {shown(value)}")
    # A file may do without. In a request it can only be a mistake, which nobody would see: the text is empty.
    if "prefix_dict" not in value:
        raise ValueError("prefix_dict: missing, expected an object that says which tokens may follow which path")
    sep = value.get("sep")
    if isinstance(sep, str) and len(sep) > _MAX_SEP:  # each step makes a path
        raise ValueError(f"sep: expected at most {_MAX_SEP} characters, got {len(sep)}")
    tree = read_tree(value)
    if tree.start.path not in tree:  # the same mistake in another place
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
    """Name of a tree that the server loaded at its start, or a tree."""


class TreeLogitsProcessor(BuiltinProcessor):
    """Leaves each row the tokens with which its output stays on a path of its tree; all others become -inf.

    RTP-LLM's `TreeLogitsProcessor`, with a tree for each request. It differs in two points. An end token of 0 is one
    like any other: there, the sequence then never leaves the start. Where the model has none of the candidates, the
    end token may be drawn: there, nothing may.

    Args:
        trees: those that a request can ask for by name.
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
        """The request's tree.

        Raises:
            ValueError: it is not in the format, or no tree has this name.
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

    def _allowed(self, params: dict[str, Any], vocab_size: int) -> npt.NDArray[np.int64]:
        tree: TokenTree = self.prepared(params)
        request = params["__req__"]
        history: StateHistory[Place] = request.state.setdefault(("tree", tree), StateHistory(tree.start))
        return tree.allowed(history.follow(request.output_ids, tree.advance), vocab_size)
