"""Request-level callables: functions of one sequence's tokens and logits.

Three conventions are in use. The callable's signature determines which one it follows:

| a callable of | gets | from |
|---|---|---|
| two parameters | `(output_token_ids: list[int], logits [vocab])` | vLLM V0, and its `AdapterLogitsProcessor` |
| three parameters | `(prompt_token_ids: list[int], output_token_ids: list[int], logits [vocab])` | the same |
| `input_ids` and `scores` | `(int64 [1, tokens], float32 [1, vocab])` | Hugging Face transformers |

All return the logits, edited in place or new. `bind` binds a callable to a sequence; `callable_factory.py` creates one
callable per sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TypeAlias

import torch

from logitship.client.serialization.syntax import signature_of

from .calls import checked

RequestLogitsProcessor: TypeAlias = (
    Callable[[list[int], torch.Tensor], torch.Tensor]
    | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
    | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
)
"""A request-level callable of any convention."""

BoundCallable: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A callable bound to a sequence: logits [vocab] to logits [vocab]."""


class Convention(Enum):
    """The parameters of a request-level callable."""

    OUTPUT = "(output_token_ids, logits)"
    PROMPT_AND_OUTPUT = "(prompt_token_ids, output_token_ids, logits)"
    HUGGING_FACE = "Hugging Face's (input_ids, scores)"


_EXPECTED = "expected a callable of " + ", ".join(convention.value for convention in Convention)


def bind(
    function: RequestLogitsProcessor, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> BoundCallable:
    """Bind a callable to a sequence.

    Args:
        function: the callable.
        prompt_token_ids: token ids of the prompt; None if it has none.
        output_token_ids: the sequence's live list: tokens are appended to it during generation.

    Returns:
        A function from logits [vocab] to a float tensor of the same shape, dtype and device: the same tensor if the
        callable edited it in place. It raises the callable's exceptions, and TypeError for any other result.

    Raises:
        TypeError: the callable follows none of the three conventions.
        ValueError: the callable needs the prompt's token ids, and the request has none.
    """
    convention = convention_of(function)
    apply: Callable[..., object] = function
    if convention is Convention.OUTPUT:
        return partial(_apply, partial(apply, output_token_ids))
    if prompt_token_ids is None:
        raise ValueError(
            f"{name_of(function)} takes the prompt's token ids, and this request has none; "
            f"use a callable of {Convention.OUTPUT.value} instead"
        )
    if convention is Convention.PROMPT_AND_OUTPUT:
        return partial(_apply, partial(apply, prompt_token_ids, output_token_ids))
    return partial(_apply_hugging_face, apply, _InputIds(prompt_token_ids, output_token_ids))


def convention_of(function: object) -> Convention:
    """Return the convention that a callable follows.

    Raises:
        TypeError: it follows none, or its signature is ambiguous; the message says what is expected.
    """
    name = name_of(function)
    if isinstance(function, type):
        raise TypeError(f"{name} is a class: {_EXPECTED}, such as an object of the class")
    if not callable(function):
        raise TypeError(f"{name} is not callable: {_EXPECTED}")
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):
        raise TypeError(f"{name} has no signature: wrap it in a function; {_EXPECTED}") from None
    if "custom_param_list" in signature.parameters:
        raise TypeError(f"{name} is a CustomLogitProcessor, not a request-level callable: give its class, or ship it")
    two, three = accepts(signature, 2), accepts(signature, 3)
    if _is_hugging_face(function, signature):
        if not two:
            raise TypeError(f"{name} takes {signature}, more than input_ids and scores: {_EXPECTED}")
        return Convention.HUGGING_FACE
    if two and three:
        raise TypeError(
            f"{name} takes {signature}, which can be called with two arguments and with three: {_EXPECTED}. Give "
            "further parameters their values with functools.partial(…, name=value)"
        )
    if not (two or three):
        raise TypeError(f"{name} takes {signature}: {_EXPECTED}")
    return Convention.OUTPUT if two else Convention.PROMPT_AND_OUTPUT


def name_of(target: object) -> str:
    """Return the display name of a class, a function or an object."""
    if isinstance(target, partial):
        return name_of(target.func)
    name = getattr(target, "__qualname__", type(target).__qualname__)
    return str(name).rpartition("<locals>.")[2]


def accepts(signature: inspect.Signature, count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments and nothing else."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _is_hugging_face(function: object, signature: inspect.Signature) -> bool:
    if list(signature.parameters)[:2] == ["input_ids", "scores"]:
        return True
    # A subclass of transformers.LogitsProcessor may name its parameters as it likes.
    return any(
        cls.__name__ == "LogitsProcessor" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(function).__mro__
    )


def _apply(function: Callable[[torch.Tensor], object], logits: torch.Tensor) -> torch.Tensor:
    # Another tensor on the same memory: the callable may reshape its own.
    return checked(function(logits.detach()), logits)


def _apply_hugging_face(function: Callable[..., object], input_ids: _InputIds, logits: torch.Tensor) -> torch.Tensor:
    scores = function(input_ids.on(logits.device), logits.detach().unsqueeze(0))
    return checked(scores, logits.unsqueeze(0)).squeeze(0)


class _InputIds:
    """A sequence's prompt and output as a tensor. Appends new tokens: O(new tokens) per step.

    Tokens are never overwritten, because callables may keep the tensor of an earlier step.
    """

    def __init__(self, prompt_token_ids: list[int], output_token_ids: list[int]) -> None:
        self._prompt = prompt_token_ids
        self._output = output_token_ids
        self._buffer: torch.Tensor | None = None
        self._length = 0

    def on(self, device: torch.device) -> torch.Tensor:
        """Return all tokens, int64 [1, tokens]. `device` is the same in every call."""
        if self._buffer is None:
            self._buffer = torch.empty(0, dtype=torch.int64, device=device)
            self._buffer = self._with(self._buffer, self._prompt)
        self._buffer = self._with(self._buffer, self._output[self._length - len(self._prompt) :])
        return self._buffer[: self._length].unsqueeze(0)

    def _with(self, buffer: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
        """Return the buffer with these tokens appended; a larger buffer if it was full."""
        end = self._length + len(token_ids)
        if end > len(buffer):
            grown = buffer.new_empty(2 * end)
            grown[: self._length] = buffer[: self._length]
            buffer = grown
        if token_ids:
            buffer[self._length : end] = torch.tensor(token_ids, dtype=torch.int64, device=buffer.device)
            self._length = end
        return buffer
