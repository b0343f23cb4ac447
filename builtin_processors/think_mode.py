"""A limit on the output tokens until the end of thinking: RTP-LLM's two processors of this name.

Both count from the first output token, whatever the prompt contains, and search the output for the marker that ends
thinking (one or several tokens). To force a token, RTP-LLM sets the other logits to the lowest float32, this module to
-inf. Without other processors, the result is the same. With a mask that forbids the forced token, the former makes all
allowed tokens equally likely, so that one is sampled at random; the latter leaves none, and the request ends with an
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch

from logitship.builtin_processors.parts.marker import MarkerIds
from logitship.builtin_processors.parts.row_edits import forbid_tokens, force_tokens, on_device
from logitship.builtin_processors.parts.state_history import StateHistory
from logitship.builtin_processors.parts.string_contain import StringContainAutomaton
from logitship.builtin_processors.parts.text_tokens import encoded
from logitship.sampler.allowed_tokens import AllowedTokens

from .base import BuiltinProcessor
from .params import Count, Expects, ModelFacts, ProcessorParams, shown

_FORCED_LOGIT = 1.0
_DEFAULT_END_TAG = "</think>\n\n"

OptionalMarkerIds = Annotated[MarkerIds | None, Expects("a list of token ids")]
OptionalTag = Annotated[str | None, Expects("a string")]


class ThinkModeParams(ProcessorParams):
    """See `ThinkModeLogitsProcessor`."""

    max_thinking_tokens: Count
    """Maximum output tokens until thinking ends. 0: no limit; the processor does nothing."""
    in_think_mode: Annotated[bool, Expects("true or false")] = True
    """false: the processor does nothing."""
    end_think_token_ids: OptionalMarkerIds = None
    """The marker that ends thinking. Default: the tokens of `end_think_tag`."""
    end_think_tag: OptionalTag = None
    """The marker as text; `\\n` may also be written as a backslash and an n. Default: `</think>` and two new lines."""


class StrictThinkModeParams(ThinkModeParams):
    """See `StrictThinkModeLogitsProcessor`."""

    begin_think_token_ids: OptionalMarkerIds = None
    """The marker that begins thinking. Default: the tokens of `begin_think_tag`."""
    begin_think_tag: OptionalTag = None
    """The same as text. Default: none, and no token is forbidden because of it."""


@dataclass(frozen=True)
class ThinkLimit:
    """The request's validated parameters.

    Attributes:
        is_on: False if the processor does nothing.
        max_tokens: the limit. A negative limit, which a request cannot set, is exceeded from the start.
        marker: finds the end of thinking in the output.
        begin: the first token of the marker that begins thinking; None if there is none.
    """

    is_on: bool
    max_tokens: int
    marker: StringContainAutomaton
    begin: int | None = None

    @cached_property
    def state_key(self) -> str:
        """Key of the history in a sequence's state. Cached, because a marker may be long."""
        return f"think_mode:{self.marker.pattern}"


class ThinkModeLogitsProcessor(BuiltinProcessor):
    """Forces the marker that ends thinking after `max_thinking_tokens - 1` output tokens without it.

    RTP-LLM's processor up to August 2026, which its documentation describes. The marker begins at output token number
    `max_thinking_tokens`, counted from 1. If the output ends with the beginning of the marker, the rest is forced.
    After the marker, nothing is forced any more.
    """

    name = "think_mode"
    Params: ClassVar[type[ProcessorParams]] = ThinkModeParams
    example: ClassVar[Mapping[str, Any]] = {"max_thinking_tokens": 3, "end_think_token_ids": [4, 5]}

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> ThinkLimit:
        """Validate the parameters, and tokenize the marker.

        Raises:
            ValueError: a parameter is invalid; two parameters exclude each other; the marker has no token.
        """
        return self._limit(super().prepare(params, model), model)

    def _limit(self, wanted: ThinkModeParams, model: ModelFacts) -> ThinkLimit:
        marker = _tokens_of(wanted, "end", model, default=_DEFAULT_END_TAG)
        if not marker:
            name = "end_think_token_ids" if wanted.end_think_tag is None else "end_think_tag"
            raise ValueError(f"{name}: expected at least one token, without any thinking would never end")
        return ThinkLimit(
            wanted.in_think_mode and wanted.max_thinking_tokens != 0,
            wanted.max_thinking_tokens,
            StringContainAutomaton(marker),
        )

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Force the next token of the marker on each row whose limit is reached, in place."""
        forced: dict[int, int] = {}
        forbidden: list[tuple[int, int]] = []
        for row, params in enumerate(custom_param_list or ()):
            token, others = self._decided(params)
            if token is not None:
                forced[row] = token
            forbidden += [(row, other) for other in others]
        force_tokens(logits, forced, _FORCED_LOGIT)
        if forbidden:
            rows, tokens = zip(*forbidden, strict=True)
            forbid_tokens(logits, on_device(rows, tokens, logits.device))
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`."""
        for params, each in zip(param_list, allowed, strict=True):
            token, others = self._decided(params)
            each.forbid(others)
            if token is not None:
                each.keep([token])

    def _decided(self, params: dict[str, Any]) -> tuple[int | None, list[int]]:
        """Return the only token allowed next in a row, or None, and the tokens that must not come next."""
        limit: ThinkLimit = self.prepared(params)
        if not limit.is_on:
            return None, []
        request = params["__req__"]
        history: StateHistory[int] = request.state.setdefault(limit.state_key, StateHistory(0))
        status = history.follow(request.output_ids, limit.marker.step)
        if self._forces(limit, status, len(request.output_ids)):
            return limit.marker.next_token(status), []
        return None, self._forbidden(limit, status)

    def _forces(self, limit: ThinkLimit, status: int, num_output: int) -> bool:
        return not limit.marker.is_finished(status) and num_output + 1 >= limit.max_tokens

    def _forbidden(self, limit: ThinkLimit, status: int) -> list[int]:
        """Return the tokens that must not come next."""
        return []


class StrictThinkModeLogitsProcessor(ThinkModeLogitsProcessor):
    """Forces the marker that ends thinking after `max_thinking_tokens` output tokens without it.

    RTP-LLM's class since August 2026, which its engine does not use. Its limit is one token longer, and it also differs
    from `ThinkModeLogitsProcessor` as follows:

    - as soon as the output ends with the beginning of the marker, the rest is forced;
    - thinking cannot begin again: the first token of the marker that begins it is always forbidden, and after the end
      marker also the end marker's first token.

    RTP-LLM assumes that a forced token is sampled; this class checks the history, so that tokens can be removed. The
    two only differ if another processor makes the engine sample another token: then the marker is forced again.
    """

    name = "strict_think_mode"
    Params = StrictThinkModeParams
    example: ClassVar[Mapping[str, Any]] = {
        "max_thinking_tokens": 3,
        "begin_think_token_ids": [3],
        "end_think_token_ids": [4, 5],
    }

    def _limit(self, wanted: ThinkModeParams, model: ModelFacts) -> ThinkLimit:
        assert isinstance(wanted, StrictThinkModeParams)
        begin = _tokens_of(wanted, "begin", model, default="")
        limit = super()._limit(wanted, model)
        return replace(limit, begin=begin[0] if begin else None)

    def _forces(self, limit: ThinkLimit, status: int, num_output: int) -> bool:
        if limit.max_tokens < 0 or limit.marker.is_finished(status):
            return False
        return status > 0 or num_output >= limit.max_tokens

    def _forbidden(self, limit: ThinkLimit, status: int) -> list[int]:
        forbidden = [] if limit.begin is None else [limit.begin]
        # A negative limit means no thinking at all.
        if limit.marker.pattern and (limit.max_tokens < 0 or limit.marker.is_finished(status)):
            forbidden.append(limit.marker.pattern[0])
        return forbidden


def _tokens_of(wanted: ThinkModeParams, which: str, model: ModelFacts, default: str) -> tuple[int, ...]:
    """Return a marker's tokens, given as ids or as text.

    Args:
        wanted: the request's parameters.
        which: "begin" or "end".
        model: the model.
        default: the tag if the request has none.
    """
    token_ids, tag = getattr(wanted, f"{which}_think_token_ids"), getattr(wanted, f"{which}_think_tag")
    if token_ids is not None:
        if tag is not None:
            raise ValueError(f"{which}_think_tag: expected only one of this and {which}_think_token_ids")
        return tuple(token_ids)
    text = (default if tag is None else tag).replace("\\n", "\n")
    if not text:
        return ()
    try:
        tokens = encoded(text, model)
    except ValueError as error:
        raise ValueError(f"{which}_think_tag: {error}") from None
    if tag and not tokens:
        raise ValueError(f"{which}_think_tag: expected a string that the tokenizer knows, {shown(tag)} has no tokens")
    return tokens
