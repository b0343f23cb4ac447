"""Requests with random processors, penalties and sampling parameters, whose tokens a trainer weighs again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from logitship import Client, GenerationError
from logitship.client.sampling_record import SamplingRecord

_PACKED = {"return_sampling_mask": True, "sampling_mask_format": "packed", "return_sampling_edits": True}

_BODIES = [
    "row[ids] = -torch.inf",
    "row[ids[0] : ids[0] + 5] = -torch.inf",
    "row[past] = -torch.inf",
    "row[row < row.max() - 5] = -torch.inf",
    "row[ids] += by",
    "row[past] -= by",
    "row *= by",
    "row += by",
    "row[ids] *= by",
    "row[ids] = row.max()",
    "row[:] = row.log_softmax(-1)",
    "row[ids] = row.mean() + by",
]


def _source(body: str) -> str:
    """Return a processor that edits the rows of its requests one by one."""
    return f"""
import torch
from logitship import CustomLogitProcessor


class Edits(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            ids, by, past = params["ids"], params["by"], params["__req__"].output_ids
            {body}
        return logits
"""


def random_request(
    rng: random.Random, tokens: Sequence[int], *, least: int = 0, **others: Sequence[Any]
) -> dict[str, Any]:
    """Return options of a request.

    Args:
        rng: the source of randomness.
        tokens: tokens that processors and biases choose from.
        least: number of shipped processors at least.
        others: values of options that only some engines have.
    """
    options: dict[str, Any] = {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": rng.randrange(1000)}
    processors = []
    for body in rng.sample(_BODIES, rng.randrange(least, 3)):
        params = {"ids": rng.sample(tokens, 4), "by": rng.choice([0.5, 1.5, 2.0])}
        processors.append({"processor": {"source": _source(body), "class_name": "Edits"}, "params": params})
    if rng.random() < 0.2:
        forbidden = {"token_ids": list(tokens[:3])}
        processors.insert(0, {"processor": {"name": "disallowed_tokens"}, "params": forbidden})
    if processors:
        options["logits_processors"] = processors
    choices: dict[str, Sequence[Any]] = {
        "top_p": [0.8, 0.95],
        "min_p": [0.02, 0.1],
        "repetition_penalty": [1.2, 0.9],
        "frequency_penalty": [0.4, -0.3],
        "presence_penalty": [0.6, -0.2],
        "logit_bias": [{str(token): 1.5 for token in tokens[:5]}],
        "min_tokens": [4],
        **others,
    }
    for name, values in choices.items():
        if rng.random() < 0.3:
            options[name] = rng.choice(values)
    options["top_k"] = rng.choice([2, 20, 500])  # edits of all tokens by different values would be too long
    return options


def sampling_record(
    client: Client, prompt: str | list[int], options: dict[str, Any], **others: Any
) -> SamplingRecord | None:
    """Return the record of the answer to a request, with its edits: of a whole one, or of a stream, by temperature.

    None: its processors and constraints together left no token.
    """
    fields = {**_PACKED, **options, **others}
    try:
        if fields["temperature"] < 1:
            answer = client.generate(prompt, **fields)
            assert answer.sampling_record is not None
            assert answer.sampling_record.token_ids.tolist() == list(answer.output_ids)
            return answer.sampling_record
        chunks = [chunk.sampling_record for chunk in client.generate_stream(prompt, **fields)]
    except GenerationError as error:
        if "left no token" not in str(error):
            raise
        return None
    return SamplingRecord.join([record for record in chunks if record is not None])


def answered(
    client: Client, prompt: str | list[int], requests: Sequence[dict[str, Any]], **others: Any
) -> list[tuple[dict[str, Any], SamplingRecord]]:
    """Send requests, twelve at a time, and return those with an answer, nearly all, with the records."""
    with ThreadPoolExecutor(12) as pool:
        records = list(pool.map(partial(sampling_record, client, prompt, **others), requests))
    found = [(options, record) for options, record in zip(requests, records, strict=True) if record is not None]
    assert len(found) > 0.9 * len(requests)
    return found
