"""Sampling masks on all routes, with the real engine on the tiny model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from starlette.testclient import TestClient

import logitship
from logitship.client.http.responses import parse_generate, parse_openai
from logitship.client.http.sse import OpenAIStream, SGLangStream
from logitship.client.sampling_record import SamplingRecord
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.app import create_app
from logitship.server.model.model_loader import LoadedModel
from tests.helpers.answers import error_of
from tests.helpers.engine_requests import byte_tokens
from tests.helpers.processors import shipped_by_row
from tests.helpers.random_cases import random_seeds

VOCAB_SIZE = 260
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True, "n": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello", "sampling_params": {**SAMPLING, "max_new_tokens": 6, "sampling_seed": 5}},
    "/v1/completions": {"prompt": "hello", **SAMPLING, "max_tokens": 6, "seed": 5, "return_token_ids": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        **SAMPLING,
        "max_tokens": 6,
        "seed": 5,
        "return_token_ids": True,
    },
}
PACKED = {"return_sampling_mask": True, "sampling_mask_format": "packed"}

_EVEN = shipped_by_row("Even", "row[1::2] = -float('inf')")
EVEN = {"source": _EVEN.source, "class_name": _EVEN.class_name}
"""Forbids every other token."""


@pytest.fixture(scope="module")
def http(make_module_engine: Callable[..., AsyncEngine]) -> Iterator[TestClient]:
    engine = make_module_engine(speculative_algorithm="NGRAM")
    with TestClient(create_app(engine), base_url="http://localhost") as client:
        yield client


def generate(http: TestClient, prompt: list[int], *, greedy: bool = False, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "sampling_seed": 5, "ignore_eos": True, "temperature": 0 if greedy else 1.0}
    sampling |= fields.pop("sampling", {})
    answer: dict[str, Any] = http.post(
        "/generate", json={"input_ids": prompt, "sampling_params": sampling, **fields}
    ).json()
    assert "error" not in answer, answer
    return answer


def stream(http: TestClient, route: str, body: dict[str, Any]) -> list[Any]:
    """Return the client's chunks of a stream."""
    dialect = SGLangStream() if route == "/generate" else OpenAIStream()
    with http.stream("POST", route, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [chunk for line in lines for chunk, _ in dialect.chunks(orjson.loads(line))]


@pytest.mark.parametrize("route", ROUTES)
def test_records_of_streams_add_up_to_those_of_whole_answers(route: str, http: TestClient) -> None:
    body = {**ROUTES[route], **PACKED}
    whole = http.post(route, json=body).json()
    answers: Any = parse_generate(whole, many=True) if route == "/generate" else parse_openai(whole, many=True)
    chunks = stream(http, route, {**body, "stream_interval": 2} if route != "/generate" else body)
    for answer in answers:
        record = answer.sampling_record
        assert tuple(record.token_ids) == answer.output_ids
        assert len(record) == 6
        parts = [chunk.sampling_record for chunk in chunks if chunk.index == answer.index and chunk.sampling_record]
        assert len(parts) > 1
        joined = SamplingRecord.join(parts)
        np.testing.assert_array_equal(joined.could_be_sampled(), record.could_be_sampled())
        np.testing.assert_array_equal(joined.logprobs, record.logprobs)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mode", ["selected", "support"])
def test_lists_say_the_same(route: str, mode: str, http: TestClient) -> None:
    body = orjson.loads(orjson.dumps(ROUTES[route]))
    body.get("sampling_params", body)["top_k"] = 4
    packed = http.post(route, json={**body, **PACKED}).json()
    fields = {"return_sampling_mask": True, "sampling_logprobs_mode": mode}
    listed = http.post(route, json={**body, **fields}).json()
    for index in range(2):
        if route == "/generate":
            record = SamplingRecord.from_json(packed[index]["meta_info"]["sampling_record"])
            meta = listed[index]["meta_info"]
            masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
            assert meta["output_token_sampling_mask_length"] == 6
        else:
            record = SamplingRecord.from_json(packed["choices"][index]["sampling_record"])
            choice = listed["choices"][index]
            masks, logprobs = choice["sampling_mask"], choice["sampling_logprobs"]
        assert all(1 <= len(mask) <= 4 for mask in masks)
        assert max(map(len, masks)) > 1
        same = SamplingRecord.from_lists(VOCAB_SIZE, record.token_ids.tolist(), masks, logprobs)
        np.testing.assert_array_equal(same.could_be_sampled(), record.could_be_sampled())
        np.testing.assert_allclose(same.logprobs, record.logprobs, atol=1e-6)
        if mode == "support":
            assert all(np.exp(each).sum() == pytest.approx(1) for each in logprobs)
            assert all(each == sorted(each, reverse=True) for each in logprobs)


def test_lists_of_a_stream_are_cumulative_as_in_sglang(http: TestClient) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "return_sampling_mask": True}
    chunks = stream(http, "/generate", body)
    assert [len(chunk.raw["meta_info"]["output_token_sampling_mask"]) for chunk in chunks] == [1, 2, 3]


def test_responses_route(http: TestClient) -> None:
    body = {"input": "hello", "max_output_tokens": 4, "return_token_ids": True, "seed": 1, **PACKED}
    answer = http.post("/v1/responses", json=body).json()
    assert SamplingRecord.from_json(answer["sampling_record"]).token_ids.tolist() == answer["token_ids"]


def test_one_flag_per_prompt(http: TestClient) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 2}
    body = {"text": ["a", "b"], "sampling_params": sampling, "return_sampling_mask": [False, True]}
    one, other = http.post("/generate", json=body).json()
    assert "output_token_sampling_mask" not in one["meta_info"]
    assert other["meta_info"]["output_token_sampling_mask"] == [[token] for token in other["output_ids"]]


_RESHAPES = {
    "Adds": "row[params['ids']] += params['by']",
    "Scales": "row *= params['by']",
    "ScalesSome": "row[params['ids']] *= params['by']",
    "Replaces": "row[params['ids']] = params['by']",
    "Bends": "row[:] = row.sign() * row.abs() ** 1.1 + 0.1 * torch.arange(len(row)).sin()",
    "Shifts": "row += params['by']",
    "Normalizes": "row[:] = row.log_softmax(-1)",
    "Unmasks": "row[params['ids']] = -torch.inf; row[params['ids'][0]] = params['by']",
}
RESHAPES = {name: shipped_by_row(name, body) for name, body in _RESHAPES.items()}
EDITS = {**PACKED, "return_sampling_edits": True}


def random_edits(rng: random.Random) -> dict[str, Any]:
    """Return fields of a request whose processors and parameters also change logits."""
    fields = random_fields(rng)
    sampling = fields["sampling"]
    if rng.random() < 0.4:
        sampling["logit_bias"] = {str(token): rng.uniform(-3, 3) for token in rng.sample(range(4, 260), 5)}
    for name, values in (("repetition", (1.3, 0.8)), ("frequency", (0.5, -0.5)), ("presence", (1.0, -0.3))):
        if rng.random() < 0.4:
            sampling[f"{name}_penalty"] = rng.choice(values)
    processors = list(fields["logits_processors"] or ())
    for name in rng.sample(sorted(RESHAPES), rng.randrange(1, 4)):
        processor = {"source": RESHAPES[name].source, "class_name": name}
        params = {"ids": rng.sample(range(4, 260), 12), "by": rng.choice([0.5, 1.7, 2.0])}
        processors.insert(rng.randrange(len(processors) + 1), {"processor": processor, "params": params})
    return {**fields, "logits_processors": processors, **EDITS}


def bare_logits(model: LoadedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return the model's own logits of the output's tokens, float64 [n, vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return logits


@random_seeds(100, shares_fixtures=True)
def test_replay_repeats_the_edits(seed: int, http: TestClient, unserved_model: LoadedModel) -> None:
    rng = random.Random(seed)
    prompt = rng.choices(range(4, VOCAB_SIZE), k=rng.randrange(1, 20))
    answer = generate(http, prompt, **random_edits(rng))
    record = SamplingRecord.from_json(answer["meta_info"]["sampling_record"])
    logits = bare_logits(unserved_model, prompt, answer["output_ids"])
    np.testing.assert_allclose(logitship.replay.replay(logits, record).numpy(), record.logprobs, atol=1e-5)
    # In a batch, some tokens of which have no edits.
    padded = torch.cat([logits, torch.zeros(1, VOCAB_SIZE)])
    other = SamplingRecord.from_lists(VOCAB_SIZE, [5], [[5, 6]], [0.0])
    batch = torch.stack([padded, torch.zeros_like(padded)])
    found = logitship.replay.replay(batch, logitship.replay.collate([record, other], len(padded)))
    np.testing.assert_allclose(found[0, :-1].numpy(), record.logprobs, atol=1e-5)
    assert found[1, 0] == pytest.approx(-math.log(2))


def test_edits_of_streams_are_joined(http: TestClient) -> None:
    sampling = {"max_new_tokens": 5, "sampling_seed": 1, "logit_bias": {"70": 2.0}, "ignore_eos": True}
    body = {"input_ids": [70, 71, 72], "sampling_params": sampling, **EDITS}
    whole = SamplingRecord.from_json(http.post("/generate", json=body).json()["meta_info"]["sampling_record"])
    joined = SamplingRecord.join([chunk.sampling_record for chunk in stream(http, "/generate", body)])
    assert len(whole.edits) == 5
    for name, value in vars(whole.edits).items():
        np.testing.assert_array_equal(value, getattr(joined.edits, name), err_msg=name)


def random_fields(rng: random.Random) -> dict[str, Any]:
    """Return fields of a request whose processors and parameters only remove tokens."""
    processors: list[Any] = [
        {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": rng.sample(range(4, 260), 9)}},
        {"processor": EVEN, "params": {}},
        {"processor": {"name": "no_repeat_ngram"}, "params": {"ngram_size": 2, "window_size": 8}},
    ]
    sampling: dict[str, Any] = {
        "temperature": rng.choice([0.3, 1.0, 2.0]),
        "top_k": rng.choice([-1, 3, 40]),
        "top_p": rng.choice([1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.02]),
        "sampling_seed": rng.getrandbits(32),
    }
    if rng.random() < 0.3:
        sampling["allowed_token_ids"] = rng.sample(range(4, 260), 100)
    if rng.random() < 0.2:
        sampling["bad_words"] = ["e", "ab"]
    if rng.random() < 0.2:
        sampling["regex"] = "[a-zA-Z]+"
    return {"sampling": sampling, "logits_processors": rng.sample(processors, rng.randrange(3)) or None, **PACKED}


@random_seeds(60, shares_fixtures=True)
def test_replay_of_the_bare_model_gives_the_servers_numbers(
    seed: int, http: TestClient, unserved_model: LoadedModel
) -> None:
    rng = random.Random(seed)
    prompt = rng.choices(range(4, VOCAB_SIZE), k=rng.randrange(1, 20))
    answer = generate(http, prompt, **random_fields(rng))
    record = SamplingRecord.from_json(answer["meta_info"]["sampling_record"])
    replayed = logitship.replay.replay(bare_logits(unserved_model, prompt, answer["output_ids"]), record)
    np.testing.assert_allclose(replayed.numpy(), record.logprobs, atol=1e-5)


def test_forced_and_drafted_tokens_have_masks(http: TestClient) -> None:
    sampling = {"max_new_tokens": 24, "regex": "(abcdefgh){3}"}
    answer = generate(http, byte_tokens("abcdefghabcdefgh"), greedy=True, sampling=sampling, **PACKED)
    record = SamplingRecord.from_json(answer["meta_info"]["sampling_record"])
    assert answer["text"] == "abcdefgh" * 3
    assert record.token_ids.tolist() == answer["output_ids"]
    assert record.logprobs.tolist() == [0.0] * 24


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"return_sampling_mask": True},
            "return_sampling_mask: needs sampling_params.top_k from 1 to 4096, temperature 0, or",
        ),
        ({"sampling_mask_format": "packed"}, "sampling_mask_format: requires return_sampling_mask"),
        ({"sampling_logprobs_mode": "support"}, "sampling_logprobs_mode: requires return_sampling_mask"),
        ({"return_sampling_edits": True}, "return_sampling_edits: requires return_sampling_mask"),
        (
            {"return_sampling_edits": True, "return_sampling_mask": True, "sampling_params": {"top_k": 5}},
            "return_sampling_edits: needs return_sampling_mask and sampling_mask_format packed",
        ),
        ({**PACKED, "sampling_logprobs_mode": "support"}, "sampling_logprobs_mode: must be selected with"),
        ({**PACKED, "sampling_params": {"num_beams": 2}}, "return_sampling_mask: is not supported with beam search"),
        ({"return_sampling_mask": [True]}, "return_sampling_mask: must not be a list"),
        ({"return_sampling_mask": 1}, "return_sampling_mask: "),
    ],
)
def test_requests_that_are_refused(fields: dict[str, Any], message: str, http: TestClient) -> None:
    answer = http.post("/generate", json={"text": "a", **fields})
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]
