"""The test cases of a check: sequences with prompts, parameters and a source of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from logitship.server.model.model_loader import LoadedModel

from .case_params import Params

NUM_CASES = 7
"""Cases of a check with up to as many parameter sets."""
_TOKENS_LEFT_BY_STRICT_MASK = 8


LogitsSource: TypeAlias = Callable[[Sequence[int]], torch.Tensor]
"""From a sequence's output so far, one token more than in the previous call, to the logits of the next step, float32
[vocab] on the CPU."""


@dataclass(frozen=True, eq=False)
class CheckCase:
    """A sequence to run.

    Attributes:
        rid: the request id.
        name: the kind of its logits, as the report names it.
        params: the `custom_params` of its row.
        prompt_token_ids: the prompt.
        source: makes the source of its logits.
        is_masked: some of its logits are already -inf, as after a mask or another processor.
    """

    rid: str
    name: str
    params: Params
    prompt_token_ids: Sequence[int]
    source: Callable[[], LogitsSource]
    is_masked: bool = False


def make_cases(loaded: LoadedModel, prompts: Sequence[str], param_sets: Sequence[Params]) -> list[CheckCase]:
    """Make four cases with random logits, two of them masked, and three or more with the model's logits.

    Prompts have different lengths. The parameter sets are assigned in turn, each to one case or more.
    """
    count = max(NUM_CASES, len(param_sets))
    encoded = [loaded.tokenizer.encode(prompt)[: loaded.max_len // 2] for prompt in prompts]
    texts = [_shortened(encoded[number % len(encoded)], number // len(encoded)) for number in range(count)]
    params = [param_sets[number % len(param_sets)] for number in range(count)]

    def random(number: int, name: str, scale: float, allowed: int | None = None) -> CheckCase:
        source = partial(_random_logits, loaded.vocab_size, loaded.eos_token_ids, number, scale, allowed)
        return CheckCase(f"check-{number}", name, params[number], texts[number], source, is_masked=allowed is not None)

    few = min(_TOKENS_LEFT_BY_STRICT_MASK, loaded.vocab_size // 2)
    cases = [
        random(0, "random logits", 1.0),
        random(1, "large random logits", 20.0),
        random(2, "random logits, half of them -inf", 4.0, loaded.vocab_size // 2),
        random(3, f"random logits, all but {few} -inf", 4.0, few),
    ]
    for number in range(4, count):
        text = texts[number]
        cases.append(
            CheckCase(f"check-{number}", "real logits", params[number], text, partial(_real_logits, loaded, text))
        )
    return cases


def _shortened(prompt: list[int], count: int) -> list[int]:
    """Drop the last `count` tokens, but keep one: histories must differ even if there are few prompts."""
    return prompt[: max(1, len(prompt) - count)]


def _random_logits(
    vocab_size: int, eos_token_ids: frozenset[int], seed: int, scale: float, allowed: int | None
) -> LogitsSource:
    """Return a source of normally distributed logits, the same for the same seed.

    Args:
        vocab_size: number of logits.
        eos_token_ids: never masked.
        seed: of the random numbers.
        scale: standard deviation.
        allowed: number of tokens that are not masked, the same ones in every step. None: all.
    """
    random = torch.Generator().manual_seed(seed)
    forbidden = torch.tensor([], dtype=torch.int64)
    if allowed is not None:
        order = torch.randperm(vocab_size, generator=random)
        # Real masks allow the EOS tokens, and many processors force one.
        forbidden = order[allowed:][~torch.isin(order[allowed:], torch.tensor(sorted(eos_token_ids)))]

    def next_logits(tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.randn(vocab_size, generator=random) * scale
        logits[forbidden] = -torch.inf
        return logits

    return next_logits


def _real_logits(loaded: LoadedModel, prompt: Sequence[int]) -> LogitsSource:
    """Return a source of the model's logits."""
    model: Any = loaded.model
    waiting = list(prompt) or sorted(loaded.eos_token_ids)[:1]
    cache: Any = None

    @torch.no_grad()
    def next_logits(tokens: Sequence[int]) -> torch.Tensor:
        nonlocal cache
        ids = torch.tensor([[*waiting, *tokens[-1:]]], device=model.device)
        waiting.clear()
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits: torch.Tensor = output.logits[0, -1, : loaded.vocab_size]
        return logits.to("cpu", torch.float32)

    return next_logits
