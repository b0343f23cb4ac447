"""Restricts an answer to given choices. Behaves as in NVIDIA's logits-processor-zoo 0.2.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import Field

from logitship.builtin_processors.parts.enforce import enforce
from logitship.builtin_processors.parts.row_constants import RowConstants, padded, to_device
from logitship.builtin_processors.parts.text_tokens import MAX_BOOST, Boost, TokenOfText

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams

_MAX_CHOICES = 1024


class MultipleChoiceParams(ProcessorParams):
    """See `MultipleChoiceLogitsProcessor`."""

    choices: Annotated[
        Annotated[list[TokenOfText], Field(min_length=1, max_length=_MAX_CHOICES)],
        Expects(f"a list of 1 to {_MAX_CHOICES} texts of one token each"),
    ] = Field(default=cast(Any, ["1", "2", "3", "4"]), validate_default=True)
    """The answers to choose from."""
    delimiter: TokenOfText = Field(default=cast(Any, "."), validate_default=True)
    """The text after a choice in the prompt."""
    boost_first_words: Boost = 0.0
    """The factor of the logit of the first word after a choice in the prompt that is added to the choice's logit."""


@dataclass(frozen=True)
class Question:
    """The request's validated parameters, as tokens."""

    choices: tuple[int, ...]
    delimiter: int
    boost_first_words: float


@dataclass(frozen=True, eq=False)
class Choices:
    """A sequence's choices.

    Attributes:
        tokens: the choices.
        first_words: pairs of a choice and the token that follows it in the prompt, for those found there.
        boost_first_words: see `MultipleChoiceParams`.
    """

    tokens: tuple[int, ...]
    first_words: tuple[tuple[int, int], ...]
    boost_first_words: float


@dataclass(frozen=True)
class _Batch:
    """Choices of all rows.

    Attributes:
        tokens: int64 [rows, max choices], padded.
        boosted: rows, choices and first words, int64 [3, n]; None if there are none.
        boosts: float32 [n].
    """

    tokens: torch.Tensor
    boosted: torch.Tensor | None
    boosts: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Choices], device: torch.device) -> _Batch:
        cells = [
            (row, choice, word, choices.boost_first_words)
            for row, choices in enumerate(rows)
            for choice, word in choices.first_words
        ]
        boosted = to_device((cell[:3] for cell in cells), np.int64, device).t() if cells else None
        return cls(
            padded([choices.tokens for choices in rows], device),
            boosted,
            to_device((cell[3] for cell in cells), np.float32, device),
        )


class MultipleChoiceLogitsProcessor(BuiltinProcessor):
    """Enforces in every step that the next token is one of `choices`.

    With `boost_first_words`, the choices are searched in the prompt in order, each at the start of a line and before
    `delimiter`. A choice that is found gets a share of the logit of the word after it, because some models predict the
    words better than their numbers.
    """

    name = "multiple_choice"
    Params = MultipleChoiceParams
    example: ClassVar[Mapping[str, Any]] = {"choices": ["1", "2"], "boost_first_words": 0.5}

    def __init__(self) -> None:
        self._batch = RowConstants(_Batch.of)

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> Question:
        """See `BuiltinProcessor.prepare`."""
        read = MultipleChoiceParams.read(params, model)
        return Question(tuple(read.choices), read.delimiter, read.boost_first_words)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Enforce each row's choices, in place."""
        if not custom_param_list:
            return logits
        batch = self._batch.of([self._choices(params) for params in custom_param_list], logits.device)
        if batch.boosted is not None:
            rows, choices, words = batch.boosted
            # A word that a mask forbids must not forbid its choice.
            of_words = logits[rows, words].masked_fill_(logits[rows, words] == -torch.inf, 0.0)
            logits[rows, choices] += (batch.boosts * of_words).clamp_(-MAX_BOOST, MAX_BOOST)
        enforce(logits, batch.tokens)
        return logits

    def _choices(self, params: dict[str, Any]) -> Choices:
        request = params["__req__"]
        if self.name not in request.state:
            question: Question = self.prepared(params)
            words = _first_words(question, request) if question.boost_first_words else ()
            request.state[self.name] = Choices(question.choices, tuple(words), question.boost_first_words)
        choices: Choices = request.state[self.name]
        return choices


def _first_words(question: Question, request: Any) -> Iterator[tuple[int, int]]:
    """Yield the choices found in the prompt, each with its first word.

    They are searched in order: without "2.", "3." is not found.
    """
    prompt, found = request.origin_input_ids, 0
    for index in range(1, len(prompt) - 2):
        if found == len(question.choices):
            return
        choice = question.choices[found]
        if prompt[index] != choice or prompt[index + 1] != question.delimiter:
            continue
        # The tokenizer cannot decode the numbers that SGLang puts into prompts where an image is.
        before = prompt[index - 1]
        if before < request.vocab_size and request.tokenizer.decode([before]).endswith("\n"):
            found += 1
            if prompt[index + 2] < request.vocab_size:
                yield choice, prompt[index + 2]
