"""Batch invariance: thirty-two concurrent streams on a real model with five processors equal single requests.

Floating-point sums round differently in another batch composition. If two tokens are so close that rounding decides
between them, an output may differ from that of the single request. The test then checks that the log-probabilities
show such a near-tie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from logitship import AsyncClient, CustomLogitProcessor
from logitship.client.records import TokenLogprob
from logitship.sampler.ops.sample_tokens import uniform_numbers
from logitship.server.config import ServerConfig
from logitship.server.engine.active_requests import continuation_seed
from logitship.server.http_server import running_server

TOKENS = 24
NEAR = 1e-3
"""Log-probabilities of float32 logits agree to about 1e-5; a near-tie is a hundred times wider, and still rare."""


class WithoutLetter(CustomLogitProcessor):
    """Forbids tokens with a letter."""

    def __init__(self) -> None:
        self.masks: dict[str, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            letter, req = params["letter"], params["__req__"]
            if letter not in self.masks:
                tokens = req.tokenizer.convert_ids_to_tokens(range(req.vocab_size))
                self.masks[letter] = torch.tensor([letter in token.lower() for token in tokens])
            logits[row, self.masks[letter]] = -torch.inf
        return logits


class Raise(CustomLogitProcessor):
    """Adds a bias to some tokens, and returns a new tensor."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        result = logits.double()
        for row, params in enumerate(custom_param_list or ()):
            result[row, params["token_ids"]] += params["by"]
        return result


class NoRepeat(CustomLogitProcessor):
    """Forbids repeated tokens, and keeps the tokens so far in the sequence's state."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            req = params["__req__"]
            seen = req.state.setdefault("seen", [])
            assert seen == req.output_ids[:-1]
            seen += req.output_ids[len(seen) :]
            logits[row, seen] = -torch.inf
        return logits


class EveryOther(CustomLogitProcessor):
    """Forces every second token, by the length of the prompt and the output."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            if (len(params["__req__"].origin_input_ids) + len(params["__req__"].output_ids)) % 2:
                logits[row] = -torch.inf
                logits[row, params["token_id"]] = 0.0
        return logits


@dataclass(frozen=True)
class Wanted:
    """A request of the test."""

    prompt: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int | None:
        seed: int | None = self.options.get("seed")
        return seed


PROCESSORS: list[dict[str, Any]] = [
    {"processor": WithoutLetter, "params": {"letter": "e"}},
    {"processor": Raise, "params": {"token_ids": [260, 314, 281], "by": 2.5}},
    {"processor": NoRepeat},
    {"processor": EveryOther, "params": {"token_id": 28}},
    {"processor": "disallowed_tokens", "params": {"token_ids": [28, 30, 198]}},
]


def requests() -> list[Wanted]:
    topics = ["the sea", "a dragon", "bread", "the moon", "rain", "a lost key", "two brothers", "winter"]
    wanted = []
    for number in range(32):
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
        options |= {"return_logprob": True, "top_logprobs_num": 20, "logprobs_mode": "processed_logprobs"}
        if number % 2:
            options |= {"seed": number, "temperature": 0.9, "top_k": 12, "top_p": (1.0, 0.9)[number % 4 == 1]}
        else:
            options |= {"temperature": 0, "repetition_penalty": (1.0, 1.1)[number % 4 == 2]}
        if number % 3:
            options |= PROCESSORS[number % len(PROCESSORS)]
        wanted.append(Wanted(f"Write about {topics[number % 8]}. " * (1 + number % 5), options))
    return wanted


@dataclass
class Output:
    """The output of a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


async def stream(client: AsyncClient, wanted: Wanted) -> Output:
    output = Output()
    async for chunk in client.generate_stream(wanted.prompt, **wanted.options):
        output.text += chunk.text
        output.token_ids += chunk.output_ids
        output.logprobs += chunk.logprobs or ()
    assert len(output.token_ids) == len(output.logprobs) == TOKENS
    return output


async def run_batched_and_single(base_url: str) -> tuple[list[Output], list[Output]]:
    async with AsyncClient(base_url, timeout=300) as client:
        batched = await asyncio.gather(*(stream(client, wanted) for wanted in requests()))
        single = [await stream(client, wanted) for wanted in requests()]
    return batched, single


def is_near_tie(wanted: Wanted, position: int, single: Output, token_id: int) -> bool:
    """Return whether rounding decides between `token_id` and the token that `single` has at `position`."""
    record = single.logprobs[position]
    if wanted.seed is None:
        chosen = {top.token_id: top.logprob for top in record.top}
        best, other = chosen[record.token_id], chosen.get(token_id)
        return best is not None and other is not None and best - other < NEAR
    # The sampled token is the first one, most likely first, whose cumulative probability exceeds the uniform number.
    kept = [top for top in record.top if top.logprob is not None][: wanted.options["top_k"]]
    weights = np.exp([top.logprob for top in kept])
    cumulative = np.cumsum(weights / weights.sum())
    count = int(np.searchsorted(cumulative, wanted.options["top_p"])) + 1
    borders = cumulative[:count] / cumulative[:count][-1]
    uniform = uniform_numbers(np.array([wanted.seed], dtype=np.uint64), np.array([position]))[0]
    ties_in_order = any(a.logprob - b.logprob < NEAR for a, b in pairwise(kept) if token_id in (a.token_id, b.token_id))
    return bool(np.abs(borders - uniform).min() < NEAR) or ties_in_order


@pytest.fixture(scope="module")
def server(shallow_model: str) -> Iterator[str]:
    """Base URL of a server that runs shipped processors."""
    config = ServerConfig(
        model_path=shallow_model,
        port=0,
        enable_custom_logit_processor=True,
        processor_isolation="none",
        max_model_len=256,
        log_level="warning",
    )
    with running_server(config) as base_url:
        yield base_url


def test_outputs_are_batch_invariant(server: str) -> None:
    batched, alone = asyncio.run(run_batched_and_single(server))
    differing = 0
    for wanted, output, single in zip(requests(), batched, alone, strict=True):
        if output.token_ids == single.token_ids:
            assert output.text == single.text
            continue
        differing += 1
        position = next(i for i in range(TOKENS) if output.token_ids[i] != single.token_ids[i])
        assert is_near_tie(wanted, position, single, output.token_ids[position]), (wanted, position)
    assert differing <= 4, "near-ties are rare: so many differences have another cause"


async def several_and_single(base_url: str, wanted: Wanted, n: int) -> tuple[list[Output], list[Wanted], list[Output]]:
    """Return the continuations of one request, the equivalent single requests, and the outputs of these."""
    assert wanted.seed is not None
    singles = [
        Wanted(wanted.prompt, wanted.options | {"seed": continuation_seed(wanted.seed, index)}) for index in range(n)
    ]
    async with AsyncClient(base_url, timeout=300) as client:
        results = await client.generate(wanted.prompt, n=n, **wanted.options)
        alone = [await stream(client, single) for single in singles]
    assert isinstance(results, list)
    several = [Output(result.text, list(result.output_ids), list(result.logprobs or ())) for result in results]
    return several, singles, alone


def test_continuations_equal_single_requests(server: str) -> None:
    for number in (3, 7, 29):  # without a processor, with a stateful one, with a built-in one
        wanted = requests()[number]
        several, singles, alone = asyncio.run(several_and_single(server, wanted, 3))
        for single, output, expected in zip(singles, several, alone, strict=True):
            differing = [i for i in range(TOKENS) if output.token_ids[i] != expected.token_ids[i]]
            assert not differing or is_near_tie(single, differing[0], expected, output.token_ids[differing[0]])


def test_is_near_tie_can_fail(server: str) -> None:
    """The check for near-ties in the tests above can fail."""
    greedy = Wanted("The capital of France is", requests()[0].options | {"processor": None, "max_new_tokens": TOKENS})

    async def one() -> Output:
        async with AsyncClient(server, timeout=300) as client:
            return await stream(client, greedy)

    output = asyncio.run(one())
    runner_up = output.logprobs[0].top[5].token_id
    assert runner_up is not None
    assert not is_near_tie(greedy, 0, output, runner_up)
