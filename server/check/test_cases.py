"""The sequences that a check plays: their prompts, their parameters, and where their logits come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from logitship.server.check.checks.params_check import Params
from logitship.server.model.model_loader import LoadedModel

NUM_TRIALS = 7
_LEFT_BY_STRICT_MASK = 8


class LogitsSource(Protocol):
    """The logits of one sequence, step after step."""

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [vocab] on the CPU.

        Args:
            tokens: the output so far: one more than at the call before.
        """
        ...


@dataclass(frozen=True, eq=False)
class Trial:
    """A sequence to play.

    Attributes:
        rid: its request's id.
        name: where its logits come from, for people.
        is_masked: some of its logits are -inf from the start, as after a mask or another processor.
        source: begins it.
    """

    rid: str
    name: str
    params: Params
    prompt_token_ids: Sequence[int]
    source: Callable[[], LogitsSource]
    is_masked: bool = False


def make_trials(loaded: LoadedModel, prompts: Sequence[str], param_sets: Sequence[Params]) -> list[Trial]:
    """Four sequences of random logits, two of which have forbidden tokens, and three of real ones.

    Their prompts have different lengths, and their parameters take turns, so that each set meets each kind.
    """
    encoded = [loaded.tokenizer.encode(prompt)[: loaded.max_len // 2] for prompt in prompts]
    texts = [_shortened(encoded[number % len(encoded)], number // len(encoded)) for number in range(NUM_TRIALS)]
    params = [param_sets[number % len(param_sets)] for number in range(NUM_TRIALS)]

    def random(number: int, name: str, scale: float, allowed: int | None = None) -> Trial:
        def source() -> LogitsSource:
            return _RandomLogits(loaded.vocab_size, loaded.eos_token_ids, number, scale, allowed)

        return Trial(f"check-{number}", name, params[number], texts[number], source, is_masked=allowed is not None)

    few = min(_LEFT_BY_STRICT_MASK, loaded.vocab_size // 2)
    trials = [
        random(0, "random logits", 1.0),
        random(1, "large random logits", 20.0),
        random(2, "random logits, half of them -inf", 4.0, loaded.vocab_size // 2),
        random(3, f"random logits, all but {few} -inf", 4.0, few),
    ]
    for number in range(4, NUM_TRIALS):
        text = texts[number]
        trials.append(Trial(f"check-{number}", "real logits", params[number], text, partial(_RealLogits, loaded, text)))
    return trials


def _shortened(prompt: list[int], count: int) -> list[int]:
    """Without some of its last tokens, but not empty: histories must differ, however few prompts there are."""
    return prompt[: max(1, len(prompt) - count)]


class _RandomLogits:
    """Normal numbers. The same every time.

    Args:
        seed: another one, other numbers.
        allowed: how many tokens have a logit that is not -inf; the same in every step. None: all.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], seed: int, scale: float, allowed: int | None
    ) -> None:
        self._vocab_size = vocab_size
        self._scale = scale
        self._random = torch.Generator().manual_seed(seed)
        self._forbidden: torch.Tensor | None = None
        if allowed is not None:
            order = torch.randperm(vocab_size, generator=self._random)
            # Masks let a sequence end: many processors want to end it, too.
            self._forbidden = order[allowed:][~torch.isin(order[allowed:], torch.tensor(sorted(eos_token_ids)))]

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `LogitsSource`."""
        logits = torch.randn(self._vocab_size, generator=self._random) * self._scale
        if self._forbidden is not None:
            logits[self._forbidden] = -torch.inf
        return logits


class _RealLogits:
    """The model's."""

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int]) -> None:
        self._model: Any = loaded.model
        self._vocab_size = loaded.vocab_size
        self._waiting = list(prompt) or sorted(loaded.eos_token_ids)[:1]
        self._cache: Any = None

    @torch.no_grad()
    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `LogitsSource`."""
        new = [*self._waiting, *tokens[-1:]]
        self._waiting = []
        ids = torch.tensor([new], device=self._model.device)
        answer = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        self._cache = answer.past_key_values
        logits: torch.Tensor = answer.logits[0, -1, : self._vocab_size]
        return logits.to("cpu", torch.float32)
