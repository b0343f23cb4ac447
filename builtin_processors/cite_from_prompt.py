"""Boosts tokens of the prompt. Behaves as in NVIDIA's logits-processor-zoo 0.2.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from logitship.builtin_processors.parts.row_constants import RowConstants
from logitship.builtin_processors.parts.text_tokens import Boost, eos_token_id
from logitship.sampler.device_tensor import copies_to

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams


class CiteFromPromptParams(ProcessorParams):
    """See `CiteFromPromptLogitsProcessor`."""

    boost_factor: Boost = 1.0
    """Added to the logit of each token of the prompt. Negative: avoid the prompt's tokens."""
    boost_eos: Annotated[bool, Expects("true or false")] = True
    """Boost the EOS token, too."""
    conditional_boost_factor: Boost = 0.0
    """Also added to each token that follows the last sampled token anywhere in the prompt."""


@dataclass(frozen=True)
class Citation:
    """The request's validated parameters. `eos_token_id` is boosted like those of the prompt, unless it is None."""

    boost_factor: float
    conditional_boost_factor: float
    eos_token_id: int | None


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """The tokens to boost in a sequence's rows.

    Attributes:
        boosted: distinct token ids within the vocabulary, int64 [any].
        boost_factor: the number to add to their logits.
        pairs: adjacent tokens of the prompt, as first * `vocab_size` + second, int64 [any], ascending, distinct. Empty
            if followers are not boosted.
        vocab_size: number of columns of the logits.
    """

    boosted: npt.NDArray[np.int64]
    boost_factor: float
    pairs: npt.NDArray[np.int64]
    vocab_size: int

    @classmethod
    def of(cls, prompt: Sequence[int], wanted: Citation, vocab_size: int) -> PromptTokens:
        """Collect the tokens of a prompt."""
        tokens = np.array(prompt, dtype=np.int64)
        boosted = tokens[tokens < vocab_size]
        if wanted.eos_token_id is not None:
            boosted = np.append(boosted, wanted.eos_token_id)
        first, second = (tokens[:-1], tokens[1:]) if wanted.conditional_boost_factor else (tokens[:0], tokens[:0])
        is_within = (first < vocab_size) & (second < vocab_size)
        pairs = np.unique(first[is_within] * vocab_size + second[is_within])
        return cls(np.unique(boosted), wanted.boost_factor, pairs, vocab_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptTokens:
        return self  # immutable; and `RowConstants` compares by identity

    def followers(self, token: int) -> npt.NDArray[np.int64]:
        """Return the distinct tokens that follow a token in the prompt, int64 [any]."""
        first, end = np.searchsorted(self.pairs, (token * self.vocab_size, (token + 1) * self.vocab_size))
        return self.pairs[first:end] - token * self.vocab_size


@dataclass(frozen=True)
class _Cells:
    """Distinct cells of the logits, and the numbers to add to them.

    Attributes:
        indices: row * vocab + token, int64 [n], ascending.
        boosts: float32 [n].
    """

    indices: torch.Tensor
    boosts: torch.Tensor

    @classmethod
    def of(
        cls, boosted: Sequence[tuple[int, npt.NDArray[np.int64], float]], vocab_size: int, device: torch.device
    ) -> _Cells:
        """Build from (row, token ids, boost)."""
        to_device = copies_to(device)
        boosts = np.array([boost for _, _, boost in boosted], dtype=np.float32)
        return cls(
            to_device(np.concatenate([row * vocab_size + tokens for row, tokens, _ in boosted])),
            to_device(np.repeat(boosts, [len(tokens) for _, tokens, _ in boosted])),
        )

    def add_to(self, logits: torch.Tensor) -> None:
        """Add the boosts, in place. `logits` is contiguous."""
        # Four times as fast as `logits[rows, tokens] += boosts`: prompts may have thousands of tokens.
        logits.view(-1).scatter_add_(0, self.indices, self.boosts)


class CiteFromPromptLogitsProcessor(BuiltinProcessor):
    """Adds `boost_factor` to the logits of the prompt's tokens and of the EOS token.

    `conditional_boost_factor` is also added to tokens that follow the last sampled token anywhere in the prompt. A
    token is boosted once, however often it occurs in the prompt.
    """

    name = "cite_from_prompt"
    Params = CiteFromPromptParams
    example: ClassVar[Mapping[str, Any]] = {"boost_factor": 1.5, "conditional_boost_factor": 2.0}

    def __init__(self) -> None:
        self._cells: RowConstants[PromptTokens, _Cells] = RowConstants(_prompt_cells)

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> Citation:
        """See `BuiltinProcessor.prepare`."""
        read = CiteFromPromptParams.read(params, model)
        if read.boost_eos and not model.eos_token_ids:
            raise ValueError("boost_eos: the model has no EOS token, send false")
        return Citation(
            read.boost_factor, read.conditional_boost_factor, eos_token_id(model) if read.boost_eos else None
        )

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Boost the tokens of the rows' prompts, in place."""
        if not custom_param_list:
            return logits
        prompts = [self._prompt(params, logits.shape[1]) for params in custom_param_list]
        self._cells.of(prompts, logits.device).add_to(logits)
        following = [
            (row, prompt.followers(output[-1]), self.prepared(params).conditional_boost_factor)
            for row, (params, prompt) in enumerate(zip(custom_param_list, prompts, strict=True))
            if len(prompt.pairs) and (output := params["__req__"].output_ids)
        ]
        if following:
            _Cells.of(following, logits.shape[1], logits.device).add_to(logits)
        return logits

    def _prompt(self, params: dict[str, Any], vocab_size: int) -> PromptTokens:
        request = params["__req__"]
        if self.name not in request.state:
            request.state[self.name] = PromptTokens.of(request.origin_input_ids, self.prepared(params), vocab_size)
        prompt: PromptTokens = request.state[self.name]
        return prompt


def _prompt_cells(prompts: Sequence[PromptTokens], device: torch.device) -> _Cells:
    boosted = [(row, prompt.boosted, prompt.boost_factor) for row, prompt in enumerate(prompts)]
    return _Cells.of(boosted, prompts[0].vocab_size, device)
