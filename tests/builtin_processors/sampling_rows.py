"""Rows of logits and calls for tests of the processors that change how tokens are sampled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from logitship.builtin_processors.registry import installed_processors
from logitship.sampler.sampling_params import SamplingParams

MakeRow = Callable[..., dict[str, Any]]


def random_logits(generator: random.Random, vocab_size: int) -> torch.Tensor:
    """Return logits of one row, float32 [1, vocab]: of any spread, with ties, with masked tokens, or all but one."""
    torch_generator = torch.Generator().manual_seed(generator.getrandbits(32))
    logits = torch.randn(1, vocab_size, generator=torch_generator) * generator.choice([0.0, 0.1, 1, 4, 30])
    logits += generator.choice([0, 0, 50, -1000])
    if generator.random() < 0.3:
        logits = logits.round()  # ties
    if generator.random() < 0.3:
        logits[:, generator.randrange(vocab_size)] += 12  # a likely token
    share = generator.choice([0, 0, 0, 0.5, 0.95, 1])
    if share:
        forbidden = torch.rand(1, vocab_size, generator=torch_generator) < share
        forbidden[:, generator.randrange(vocab_size)] = False
        logits[forbidden] = -math.inf
    return logits


def random_size(generator: random.Random) -> int:
    """Return a size of a vocabulary: mostly a small one, whose edge cases matter."""
    return generator.choice([1, 2, 3, 5, 20, 63, 64, 65, 100, 257, 700, 5000])


def call(
    name: str,
    make_row: MakeRow,
    logits: torch.Tensor,
    params: dict[str, Any],
    *,
    temperature: float = 1.0,
    outputs: Sequence[list[int]] | None = None,
    processor: Any = None,
    **of_row: Any,
) -> torch.Tensor:
    """Return what a built-in processor makes of rows with the same parameters."""
    rows = [
        make_row(
            params,
            [1],
            [] if outputs is None else outputs[place],
            vocab_size=logits.shape[1],
            sampling_params=SamplingParams(temperature=temperature, seed=7),
            **of_row,
        )
        for place in range(len(logits))
    ]
    edited: torch.Tensor = (processor or installed_processors().make(name))(logits.clone(), rows)
    return edited


def kept(logits: torch.Tensor) -> set[int]:
    """Return the tokens of one row that are not forbidden."""
    return set(logits[0].isfinite().nonzero()[:, 0].tolist())


def values(logits: torch.Tensor) -> list[float]:
    """Return the logits of one row."""
    found: list[float] = logits[0].tolist()
    return found


def probabilities(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Return the softmax of one row."""
    peak = max(logits)
    weights = [math.exp((each - peak) / temperature) for each in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
