"""DRY ("don't repeat yourself"): penalizes tokens that would continue a repetition, the more the longer it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from logitship.builtin_processors.parts.repeat_index import RepeatIndex, SequenceBreakers
from logitship.builtin_processors.parts.text_tokens import MAX_BOOST, encoded
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.device_tensor import copies_to, token_positions

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams

_MAX_TAIL = 20
"""Tokens after the first one of a breaker that are compared, as in llama.cpp."""
_MAX_CACHED = 256
_NUM_BREAKERS = 64

BreakerText = Annotated[str, Field(min_length=1, max_length=40)]


class DRYParams(ProcessorParams):
    """See `DRYLogitsProcessor`."""

    dry_multiplier: Annotated[float, Field(ge=0, le=MAX_BOOST), Expects("a number from 0 to 1e9")]
    """The penalty of a repetition of `dry_allowed_length` tokens. 0: nothing is penalized."""
    dry_base: Annotated[float, Field(ge=1, le=MAX_BOOST), Expects("a number from 1 to 1e9")] = 1.75
    """Factor of the penalty for each further token."""
    dry_allowed_length: Annotated[int, Field(ge=1, le=1_000_000_000), Expects("an integer from 1 to 1000000000")] = 2
    """Shorter repetitions are not penalized."""
    dry_penalty_last_n: Annotated[int, Field(ge=-1), Expects("an integer, -1 or greater")] = -1
    """Number of last tokens of prompt and output that count. -1: all. 0: nothing is penalized."""
    dry_sequence_breakers: Annotated[
        list[BreakerText],
        Field(max_length=_NUM_BREAKERS),
        Expects(f"a list of up to {_NUM_BREAKERS} texts of 1 to 40 characters"),
    ] = Field(default=["\n", ":", '"', "*"])
    """Texts that no repetition extends over."""


@dataclass(frozen=True, eq=False)
class RepeatPenalty:
    """A request's parameters.

    Attributes:
        longest: length from which on a repetition has the highest penalty.
        window: number of last tokens that count; None for all.
        penalties: of the lengths from `allowed_length` to `longest`, float32 [any].
        breakers: where repetitions begin.
        key: key of its index in a sequence's state.
    """

    allowed_length: int
    longest: int
    window: int | None
    penalties: npt.NDArray[np.float32]
    breakers: SequenceBreakers
    key: str


class DRYLogitsProcessor(BuiltinProcessor):
    """Lowers the logits of tokens that would continue a repetition of at least `dry_allowed_length` tokens.

    A repetition is an end of prompt and output that occurs earlier; n is its length without the token. The penalty is
    `dry_multiplier` · `dry_base` ^ (n - `dry_allowed_length`), at most 1e9, for the longest repetition that the token
    continues. Repetitions begin after the last of `dry_sequence_breakers`. A token whose text contains one is never
    penalized, and breaks a sequence; so do tokens that together have the text of one.

    A step costs O(new tokens), however long the history is.

    p-e-w 2024 (oobabooga/text-generation-webui#5677); parameters and edge cases are llama.cpp's, with pi6am's breakers.
    """

    name = "dry"
    Params = DRYParams
    example: ClassVar[Mapping[str, Any]] = {
        "dry_multiplier": 0.8,
        "dry_allowed_length": 1,
        "dry_sequence_breakers": ["b2"],
    }

    def __init__(self) -> None:
        self._vocabulary: _Vocabulary | None = None

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> RepeatPenalty:
        """See `BuiltinProcessor.prepare`."""
        read = DRYParams.read(params, model)
        multiplier, base, shortest = read.dry_multiplier, read.dry_base, read.dry_allowed_length
        # No more lengths than reach the highest penalty.
        steps = 0
        if 0 < multiplier < MAX_BOOST and base > 1:
            needed = (math.log(MAX_BOOST) - math.log(multiplier)) / math.log(base)
            steps = math.ceil(min(needed, _MAX_STEPS))
        with np.errstate(over="ignore", under="ignore"):
            penalties = np.minimum(multiplier * np.power(float(base), np.arange(steps + 1)), MAX_BOOST)
        try:
            sequences = self._sequences(read.dry_sequence_breakers, model)
        except ValueError as error:
            raise ValueError(f"dry_sequence_breakers: {error}") from None
        return RepeatPenalty(
            shortest,
            shortest + steps,
            None if read.dry_penalty_last_n < 0 else read.dry_penalty_last_n,
            penalties.astype(np.float32),
            SequenceBreakers(sequences),
            f"dry:{shortest}:{steps}:{read.dry_penalty_last_n}:{read.dry_sequence_breakers}",
        )

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Penalize the tokens of all rows with one write, in place."""
        tokens, penalties = {}, []
        for row, params in enumerate(custom_param_list or ()):
            penalty: RepeatPenalty = self.prepared(params)
            found = _continuations(penalty, params["__req__"])
            if not found:
                continue
            ids = np.fromiter(found, dtype=np.int64, count=len(found))
            lengths = np.fromiter(found.values(), dtype=np.int64, count=len(found))
            known = ids < logits.shape[1]  # SGLang puts larger numbers where an image is
            if known.any():
                tokens[row] = ids[known]
                penalties.append(penalty.penalties[lengths[known] - penalty.allowed_length])
        if tokens:
            to_device = copies_to(logits.device)
            positions = token_positions(tokens, to_device)
            logits[positions] = logits[positions] - to_device(np.concatenate(penalties))
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`. Forbids nothing."""
        for each in allowed:
            each.edit_values()

    def _sequences(self, texts: Sequence[str], model: ModelFacts) -> list[tuple[int, ...]]:
        """Return the token sequences that contain one of some texts."""
        if not texts:
            return []
        vocabulary = self._vocabulary
        if vocabulary is None or vocabulary.tokenizer is not model.tokenizer:
            vocabulary = self._vocabulary = _Vocabulary(model)
        return sorted({sequence for text in texts for sequence in vocabulary.sequences(text, model)})


_MAX_STEPS = 100_000
"""Maximum number of penalties, for a base so close to 1 that they never get high."""


class _Vocabulary:
    """Texts of a model's tokens, and the token sequences of the last breakers."""

    def __init__(self, model: ModelFacts) -> None:
        encoded("", model)  # raises if there is no tokenizer
        self.tokenizer = model.tokenizer
        count = min(model.vocab_size, len(self.tokenizer))
        self._texts: list[str] = self.tokenizer.batch_decode(
            [[token] for token in range(count)], clean_up_tokenization_spaces=False
        )
        self._known: dict[str, list[tuple[int, ...]]] = {}

    def sequences(self, text: str, model: ModelFacts) -> list[tuple[int, ...]]:
        """Return the sequences: tokens that contain the text, and tokens that end with its beginning, with its rest.

        Raises:
            ValueError: the rest cannot be tokenized.
        """
        known = self._known.get(text)
        if known is None:
            known = [(token,) for token, each in enumerate(self._texts) if text in each]
            for size in range(1, len(text)):
                begin, rest = text[:size], encoded(text[size:], model)[:_MAX_TAIL]
                known += [
                    (token, *rest)
                    for token, each in enumerate(self._texts)
                    if each.endswith(begin) and text not in each
                ]
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[text] = known
        return known


def _continuations(penalty: RepeatPenalty, request: Any) -> Mapping[int, int]:
    """Return token → length of the repetition that it would continue, from a row's `__req__`."""
    if penalty.window == 0 or not penalty.penalties[0]:
        return {}
    index: RepeatIndex | None = request.state.get(penalty.key)
    if index is None:
        index = RepeatIndex(penalty.allowed_length, penalty.longest, penalty.window, penalty.breakers)
        request.state[penalty.key] = index
    index.follow(request.origin_input_ids, request.output_ids)
    return index.continuations()
