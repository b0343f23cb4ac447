"""Base class of processors that write a phrase, token by token, when the logits meet a condition."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.params import Expects, ProcessorParams
from logitship.sampler.allowed_tokens import AllowedTokens

from .enforce import enforce
from .row_constants import RowConstants, padded, to_device
from .step_states import RowState, StepStates, as_batch
from .text_tokens import PhraseTokens

Times = Annotated[int, Field(ge=0, le=1_000_000_000), Expects("an integer from 0 to 1000000000")]


class PhraseParams(ProcessorParams):
    """See `PhraseProcessor`."""

    phrase: PhraseTokens
    """The phrase to write."""


@dataclass(frozen=True)
class Phrases:
    """The rows' phrases.

    Attributes:
        tokens: int64 [rows, longest phrase], padded.
        lengths: int64 [rows].
    """

    tokens: torch.Tensor
    lengths: torch.Tensor

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the token at each row's index, int64 [rows, 1]. Unspecified for indices out of range."""
        last = self.tokens.shape[1] - 1
        return self.tokens.gather(1, indices.to(torch.int64).clamp(0, last).unsqueeze(1))


@dataclass(frozen=True)
class PhraseStep:
    """The result of `PhraseProcessor.advance`.

    Attributes:
        forced: bool [rows], whether to enforce a token of the phrase.
        indices: [rows], its index in the phrase. Unspecified if nothing is enforced.
        state: float64 [rows, state size], the next states.
    """

    forced: torch.Tensor
    indices: torch.Tensor
    state: torch.Tensor


class PhraseProcessor(BuiltinProcessor):
    """Enforces a phrase, one token per step. A subclass decides when it starts, and how it continues.

    The first number of a state is the index of the next token in the phrase, at most 0 if none is being written.

    The decision depends on the logits, so it is made on the device, without synchronization; the rows' states are
    tensors there. If tokens are removed, the state is restored, by up to `STEPS_KEPT` tokens.

    The phrase continues whatever is sampled. Its tokens that a mask forbids are not enforced, see `enforce`.
    """

    Params: ClassVar[type[ProcessorParams]] = PhraseParams

    def __init__(self) -> None:
        self._constants: RowConstants[Any, tuple[Phrases, Any]] = RowConstants(self._make_constants)

    @abstractmethod
    def initial_state(self, prepared: Any) -> Sequence[float]:
        """Return the numbers of a sequence's state before its first step."""

    @abstractmethod
    def constants(self, rows: Sequence[Any], device: torch.device) -> Any:
        """Return the rows' parameters for `advance`, as tensors.

        Args:
            rows: results of `prepare`.
            device: the device of the logits.
        """

    @abstractmethod
    def advance(self, logits: torch.Tensor, state: torch.Tensor, phrases: Phrases, constants: Any) -> PhraseStep:
        """Decide what to do in a step. Must not synchronize with the device.

        Args:
            logits: float32 [rows, vocab], read-only.
            state: float64 [rows, state size], read-only.
            phrases: the rows' phrases.
            constants: result of `constants`.
        """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Enforce the next token of the phrase in the rows that write one, in place."""
        if not custom_param_list:
            return logits
        phrases, constants = self._constants.of([self.prepared(params) for params in custom_param_list], logits.device)
        lengths = [len(params["__req__"].output_ids) for params in custom_param_list]
        histories = [self._history(params, logits.device) for params in custom_param_list]
        state = as_batch([history.before(length) for history, length in zip(histories, lengths, strict=True)])
        step = self.advance(logits, state, phrases, constants)
        self.enforce(logits, phrases.at(step.indices), step.forced)
        for row, (history, length) in enumerate(zip(histories, lengths, strict=True)):
            history.add(length, RowState(step.state, row))
        return logits

    def enforce(self, logits: torch.Tensor, tokens: torch.Tensor, forced: torch.Tensor) -> None:
        """Enforce tokens, in place. Must not synchronize with the device.

        Args:
            logits: float32 [rows, vocab].
            tokens: int64 [rows, 1].
            forced: bool [rows], the rows to edit.
        """
        enforce(logits, tokens, forced)

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`. All tokens stay possible, but the rest of a phrase is likely."""
        for params, each in zip(param_list, allowed, strict=True):
            each.expect(self._rest(params))

    def _rest(self, params: dict[str, Any]) -> Sequence[int]:
        """Return the rest of a phrase in progress; () if there is none, or the device would have to be asked."""
        request = params["__req__"]
        history: StepStates | None = request.state.get(self.name)
        state = history.after(len(request.output_ids) - 1) if history is not None else None
        if state is None or not state.batch.is_cpu:
            return ()
        index = int(state.batch[state.row, 0])
        phrase: tuple[int, ...] = self.prepared(params).phrase
        return phrase[index:] if index > 0 else ()

    def _history(self, params: dict[str, Any], device: torch.device) -> StepStates:
        state = params["__req__"].state
        if self.name not in state:
            initial = to_device([self.initial_state(self.prepared(params))], np.float64, device)
            state[self.name] = StepStates(RowState(initial, 0))
        history: StepStates = state[self.name]
        return history

    def _make_constants(self, rows: Sequence[Any], device: torch.device) -> tuple[Phrases, Any]:
        phrases = Phrases(
            padded([row.phrase for row in rows], device), to_device((len(row.phrase) for row in rows), np.int64, device)
        )
        return phrases, self.constants(rows, device)
