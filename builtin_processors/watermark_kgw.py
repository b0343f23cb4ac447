"""Marks an answer by preferring green tokens (Kirchenbauer et al., "A Watermark for Large Language Models", 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.watermarks.green_lists import GreenLists, KeyedGreenLists, PermutedGreenLists
from logitship.builtin_processors.watermarks.watermark_key import NO_KEY, WatermarkKey

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams

MAX_CONTEXT_WIDTH = 16


class WatermarkKgwParams(ProcessorParams):
    """See `WatermarkKgwLogitsProcessor`. Names and defaults are those of transformers' `WatermarkingConfig`."""

    greenlist_ratio: Annotated[float, Field(gt=0, lt=1), Expects("a number above 0 and below 1")] = 0.25
    """The part of the vocabulary that is green."""
    bias: Annotated[float, Field(ge=0, le=100), Expects("a number from 0 to 100")] = 2.0
    """Added to the logits of green tokens, before temperature."""
    context_width: Annotated[
        int, Field(ge=1, le=MAX_CONTEXT_WIDTH), Expects(f"an integer from 1 to {MAX_CONTEXT_WIDTH}")
    ] = 1
    """Number of tokens before a token that decide which tokens are green. More: harder to learn from many answers, and
    easier to remove by editing."""
    seeding_scheme: Annotated[Literal["keyed", "lefthash"], Expects('"keyed" or "lefthash"')] = "keyed"
    """`keyed`: logitship's own green lists. `lefthash`: those of transformers, with a `context_width` of 1."""

    @model_validator(mode="after")
    def _check_width(self) -> WatermarkKgwParams:
        if self.seeding_scheme == "lefthash" and self.context_width != 1:
            width = self.context_width
            raise ValueError(
                f"context_width: the green lists of lefthash depend on one token, not on {width}; use keyed"
            )
        return self


@dataclass(frozen=True, eq=False)
class GreenListBias:
    """A request's validated parameters, with the green lists that they select."""

    params: WatermarkKgwParams
    lists: GreenLists


class WatermarkKgwLogitsProcessor(BuiltinProcessor):
    """Adds `bias` to the logits of the green tokens, which depend on the last tokens and on the operator's key.

    A text of the marked model has more green tokens than one that was written without the key. The context consists of
    the last tokens of prompt and output; a row with fewer tokens than `context_width` is not marked. Nothing is kept
    from step to step.

    Args:
        key: the secret; None: requests are refused.
    """

    name = "watermark_kgw"
    Params = WatermarkKgwParams
    example: ClassVar[Mapping[str, Any]] = {"bias": 3.0, "context_width": 2}

    def __init__(self, key: WatermarkKey | None = None) -> None:
        self._key = key
        self._keyed = None if key is None else KeyedGreenLists(key)
        self._permuted: PermutedGreenLists | None = None

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> GreenListBias:
        """See `BuiltinProcessor.prepare`."""
        read = WatermarkKgwParams.read(params, model)
        if self._key is None or self._keyed is None:
            raise ValueError(NO_KEY)
        if read.seeding_scheme == "keyed":
            return GreenListBias(read, self._keyed)
        if self._permuted is None:
            self._permuted = PermutedGreenLists(self._key, model.vocab_size)
        return GreenListBias(read, self._permuted)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Add the bias to all rows, in place, at once for each scheme."""
        rows_of: dict[int, list[int]] = {}
        wanted: list[GreenListBias] = []
        contexts: list[Sequence[int]] = []
        for row, params in enumerate(custom_param_list or ()):
            wanted.append(self.prepared(params))
            contexts.append(_last_tokens(params["__req__"], wanted[row].params.context_width))
            if len(contexts[row]) == wanted[row].params.context_width:
                rows_of.setdefault(id(wanted[row].lists), []).append(row)
        for rows in rows_of.values():
            lists = wanted[rows[0]].lists
            chosen = [contexts[row] for row in rows]
            ratios = [wanted[row].params.greenlist_ratio for row in rows]
            biases = [wanted[row].params.bias for row in rows]
            if len(rows) == len(logits):
                lists.add_bias(logits, chosen, ratios, biases)
                continue
            index = to_device(rows, "int64", logits.device)
            edited = logits[index]
            lists.add_bias(edited, chosen, ratios, biases)
            logits[index] = edited
        return logits


def _last_tokens(request: Any, number: int) -> list[int]:
    """Return the last tokens of a row's prompt and output; all of them if there are fewer."""
    output: list[int] = request.output_ids
    last = output[-number:]
    return last if len(last) == number else [*request.origin_input_ids[len(last) - number :], *last]
