"""The sampler on another device than the CPU: it samples the same tokens, and waits for the device when it must."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.builtin_processors.batch_processors import make_logits_processors
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.other_device import DEVICE, OtherDevice, other_device
from tests.helpers.random_cases import random_seeds

VOCAB = 300
ROWS = 6
STEPS = 4
CPU = torch.device("cpu")


def random_params(rng: random.Random) -> dict[str, Any]:
    """Return sampling parameters, each in about a third of the requests."""
    choices: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": rng.randrange(99)},
        {"top_p": 0.8},
        {"top_k": 9},
        {"min_p": 0.05},
        {"min_tokens": 3, "stop_token_ids": [7, 8, 9], "eos_token_ids": [1]},
        {"logit_bias": {5: 3.0, 6: -2.0}},
        {"allowed_token_ids": rng.sample(range(VOCAB), 40)},
        {"bad_words_token_ids": [[5], [6, 7]]},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5},
        {"logprobs": 3},
        {"logprobs": 2, "logprobs_mode": "processed_logprobs"},
        {"trace": 2},
    ]
    params: dict[str, Any] = {"temperature": 0.0, "seed": 1}
    for each in choices:
        params |= each if rng.random() < 0.3 else {}
    return params


def run(device: torch.device, wanted: list[dict[str, Any]], stand_in: OtherDevice | None) -> list[SamplerOutput]:
    """Sample some tokens for some requests."""
    sampler = Sampler(VOCAB, device, make_logits_processors([], SimpleNamespace(reasoning_config=None), device, False))
    outputs: list[list[int]] = [[] for _ in wanted]
    added = [(row, SamplingParams(**params), [1, 2, 3], outputs[row]) for row, params in enumerate(wanted)]
    sampler.update_state(BatchUpdate(len(wanted), [], added, []))
    found = []
    for step in range(STEPS):
        logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(step)) * 3
        found.append(sampler.sample(logits if stand_in is None else stand_in.put(logits)))
        for output, token in zip(outputs, found[-1].token_ids, strict=True):
            output.append(token)
        sampler.update_state(None)
    return found


@random_seeds(60)
def test_tokens_are_those_of_the_cpu(seed: int) -> None:
    rng = random.Random(seed)
    wanted = [random_params(rng) for _ in range(ROWS)]
    expected = run(CPU, wanted, None)
    with other_device() as device:
        found = run(DEVICE, wanted, device)
    if DEVICE.type == "cuda":  # its log-probabilities differ in the last bits
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    else:
        assert found == expected


def mask_rows(logits: torch.Tensor) -> None:
    logits[logits > 0] = torch.zeros(())


def add_from_host(logits: torch.Tensor) -> None:
    logits += torch.ones(3)


@pytest.mark.parametrize(
    "wait",
    [
        lambda logits: bool((logits > 0).any()),
        lambda logits: logits.amax().item(),
        lambda logits: (logits > 0).nonzero(),
        lambda logits: logits[logits > 0],
        lambda logits: logits[[0, 1]],
        lambda logits: logits[torch.tensor([0, 1])],
        mask_rows,
        lambda logits: logits.unique(),
        lambda logits: logits[0].long().bincount(),
        lambda logits: logits.cpu(),
        lambda logits: logits.tolist(),
        lambda logits: logits.copy_(torch.ones(2, 3)),
        lambda logits: torch.tensor([1.0], device=logits.device),
        lambda logits: torch.ones(2).to(logits.device),
    ],
)
def test_device_tells_what_waits(wait: Callable[[torch.Tensor], Any]) -> None:
    with other_device() as device:
        logits = device.put(torch.zeros(2, 3))
        assert not device.waits
        wait(logits)
        assert len(device.waits) == 1


def test_device_refuses_tensors_of_two_devices() -> None:
    with other_device() as device, pytest.raises(RuntimeError, match="same device"):
        add_from_host(device.put(torch.zeros(2, 3)))


RANDOM = {"temperature": 0.8, "top_p": 1.0}
CHECK, TOKENS = "sampler.py:_check_rows", "sampler.py:sample"
SOFTMAX, COPY = "random_sampling.py:_softmax", "device_tensor.py:to_cpu"


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        ({}, [CHECK, TOKENS]),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.3}, [CHECK, TOKENS]),
        ({"bad_words_token_ids": [[5], [6, 7]], "min_tokens": 3, "eos_token_ids": [1]}, [CHECK, TOKENS]),
        ({"allowed_token_ids": [3, 4, 50], "logit_bias": {5: 3.0}}, [CHECK, TOKENS]),
        (RANDOM, [CHECK, SOFTMAX, TOKENS]),
        (RANDOM | {"min_p": 0.1}, [CHECK, SOFTMAX, TOKENS]),
        (RANDOM | {"top_k": 9, "top_p": 0.9}, [CHECK, SOFTMAX, COPY, TOKENS]),
        # Whether tokens tie decides how many are read.
        ({"logprobs": 3}, [CHECK, TOKENS, "logprobs.py:_most_likely", COPY]),
    ],
    ids=lambda each: "+".join(each) if isinstance(each, dict) else "",
)
def test_step_waits_as_often_as_it_must(params: dict[str, Any], waits: list[str]) -> None:
    """For the check of the rows, and the tokens; a whole batch like one row."""
    with other_device() as device:
        run(DEVICE, [{"temperature": 0.0, "seed": row} | params for row in range(ROWS)], device)
    waited = [each.partition(" ")[0] for each in device.waits]
    assert [each for each in waited if not each.endswith(":__init__")] == waits * STEPS
