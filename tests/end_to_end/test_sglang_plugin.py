"""The real SGLang server with logitship as its plugin, on a CPU, over HTTP.

SGLang is the real one, in a virtual environment of its own that `tests/peers/sglang_cpu.sh` creates
(`LOGITSHIP_PEER_CACHE`, else `~/.cache/logitship-peers`). It runs with and without overlap scheduling, prefills in
chunks of 64 tokens, and retracts requests all the time: `SGLANG_TEST_RETRACT`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import logitship
from logitship import (
    LLM,
    BadRequestError,
    Client,
    CustomLogitProcessor,
    GenerationError,
    InstalledProcessor,
    NotFoundError,
    SamplingParams,
    TransportError,
)
from logitship.client.serialization.processor_string import PYTHON, parse
from logitship.server.api_keys import tenant_of
from logitship.server.doctor.doctor_command import run_doctor_command
from logitship.server.tokenizer import Tokenizer
from tests.helpers.metrics import growth, read_metrics, settled_metrics

from .history_processors import FIRST, CountsCalls, ForcesFromTable, HashesHistory, OnlyEven, history_token
from .random_requests import answered, random_request
from .sglang_escapes import ESCAPES, PREVENTED, escaping
from .sglang_faults import FAULTS, faulty
from .sglang_server import SglangServer, add_distribution, sglang_serve

pytestmark = pytest.mark.timeout(1500)  # SGLang is installed on first use

STRINGS: dict[str, str] = json.loads((Path(__file__).parents[1] / "data" / "sglang_strings.json").read_text())[
    "strings"
][PYTHON]
PROMPT = "The quick brown fox"
PROMPT_IDS = [84, 71, 88, 99, 101, 120]
LONG_PROMPT = "one two three four five six seven eight nine ten " * 4
"""More tokens than are prefilled at once."""
TOKENS = 12
VOCAB_SIZE = 202_048
"""SGLang's thinking budgets name tokens up to 200,010."""
THINKING = {
    # name: start of thinking, end of thinking, new line
    "Qwen3ThinkingBudgetLogitProcessor": (151667, 151668, 198),
    "DeepSeekR1ThinkingBudgetLogitProcessor": (128798, 128799, 201),
    "Glm4MoeThinkingBudgetLogitProcessor": (151350, 151351, 198),
    "InklingThinkingBudgetLogitProcessor": (200008, 200010, 198),
}

ANY_OBJECT = {"name": "anything", "schema": {"type": "object"}}


class NeedsNoParams(CustomLogitProcessor):
    """Forces the token after the length of its history."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            logits[row] = -float("inf")
            logits[row, FIRST + len(params["__req__"].output_ids)] = 0.0
        return logits


class ForcesItsToken(CustomLogitProcessor):
    """Forces `token_id`, and fails if it does not get one dict of parameters for each row."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        assert logits.shape[0] == len(custom_param_list)
        for row, params in enumerate(custom_param_list):
            logits[row] = -float("inf")
            logits[row, params["token_id"]] = 0.0
        return logits


class WaitsInItsParams(CustomLogitProcessor):
    """Counts down in its parameters, which belong to one sequence; then forces `token_id` and the tokens after it."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> torch.Tensor:
        for row, params in enumerate(custom_param_list):
            params["delay"] -= 1
            if params["delay"] >= 0:
                continue
            is_first = params["delay"] == -1
            forced = params["token_id"] if is_first else params["__req__"].output_ids[-1] + 1
            logits[row] = -float("inf")
            logits[row, forced] = 0.0
        return logits


class CannotLoad(CustomLogitProcessor):
    """Raises when it is loaded."""

    def __init__(self) -> None:
        raise RuntimeError("no instance of this")

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


@pytest.fixture(scope="module")
def sglang_python() -> Path:
    """The interpreter of an environment with the real SGLang, created on first use."""
    cache = Path(os.environ.get("LOGITSHIP_PEER_CACHE", Path.home() / ".cache" / "logitship-peers"))
    cache.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).parents[1] / "peers" / "sglang_cpu.sh"
    command = ["flock", str(cache / "sglang.lock"), str(script), str(cache / "sglang"), sys.executable]
    subprocess.run(command, check=True)
    return cache / "sglang" / "bin" / "python"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A tiny random model, whose vocabulary has tokens that no text has."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.hf_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare_model(model_folder: Path) -> LlamaForCausalLM:
    """The same model without an engine."""
    return LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders that SGLang imports from: one that makes logitship's plugin known, and one that records unpickling."""
    distributions = tmp_path_factory.mktemp("distributions")
    add_distribution(distributions)
    return [distributions, Path(__file__).with_name("sglang_audit")]


@pytest.fixture(scope="module", params=["overlap", "normal"])
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    sglang_python: Path,
    model_folder: Path,
    folders: list[Path],
) -> Iterator[SglangServer]:
    arguments = ["--chunked-prefill-size", "64", "--enable-metrics"]
    if request.param == "normal":
        arguments.append("--disable-overlap-schedule")
    environment = {
        "LOGITSHIP_TEST_AUDIT": str(tmp_path_factory.mktemp("audit") / "log"),
        "LOGITSHIP_SGLANG_MAX_PROCESSOR_SIZE": "60000",
        "LOGITSHIP_SGLANG_TENANT_HEADER": "x-tenant",
        "LOGITSHIP_SGLANG_SANDBOX_FIRST_STEP_TIMEOUT": "2",
        "LOGITSHIP_SGLANG_STEP_SHARE": "100",  # no request is too slow because the machine is
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "5",
    }
    with sglang_serve(sglang_python, model_folder, folders, environment, *arguments) as server:
        assert f"with {request.param} scheduling" in server.text
        yield server


with_overlap = pytest.mark.parametrize("server", ["overlap"], indirect=True)
"""Marks tests of what does not depend on the scheduling."""


@pytest.fixture
def client(server: SglangServer) -> Iterator[Client]:
    with Client(server.url, timeout=300) as client:
        yield client


def generate(client: Client, prompt: str | list[int] = PROMPT, tokens: int = TOKENS, **options: Any) -> list[int]:
    """Return the tokens of a greedy answer."""
    answer = client.generate(prompt, temperature=0, max_new_tokens=tokens, ignore_eos=True, **options)
    return list(answer.output_ids)


def test_force_token(client: Client) -> None:
    assert generate(client, processor=STRINGS["ForceToken"], params={"token_id": 1234}) == [1234] * TOKENS


@pytest.mark.mode("SGLang", "registered processors and artifacts", "the real engine")
@with_overlap
def test_registered_processors(server: SglangServer) -> None:
    """They are uploaded once, and named by digest and by name. Another tenant has none of them."""
    headers = {"x-tenant": "registers"}
    with Client(server.url, timeout=300, headers=headers) as client:
        registered = client.register(ForcesFromTable, "Mine")
        expected = client.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True, processor=registered)
        assert list(expected.output_ids) == [FIRST + step for step in range(TOKENS)]
        assert generate(client, processor="Mine@1") == list(expected.output_ids)
        entries = [{"processor": "Mine"}, {"processor": STRINGS["ForceToken"], "params": {"token_id": 5}}]
        assert generate(client, logits_processors=entries) == [5] * TOKENS
        sdk = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", default_headers=headers, max_retries=0, timeout=300
        )
        options: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": TOKENS}
        for processor in ({"digest": registered.digest}, {"name": "Mine"}):
            body = {"custom_logit_processor": processor, "ignore_eos": True}
            whole = sdk.completions.create(extra_body=body, **options)
            assert whole.choices[0].text == expected.text
            with sdk.completions.create(stream=True, extra_body=body, **options) as stream:
                assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected.text
        sdk.close()
        with Client(server.url, timeout=300, headers={"x-tenant": "other"}) as other:
            for reference in ("Mine", registered):
                with pytest.raises(NotFoundError):
                    other.processor(reference)
            with pytest.raises(BadRequestError, match="no processor is installed or registered as 'Mine'"):
                generate(other, processor="Mine")
        assert client.delete_processor("Mine") == ["Mine@1"]
        with pytest.raises(BadRequestError, match=f"no processor {registered.digest} is registered"):
            generate(client, processor=registered)


@pytest.mark.mode("SGLang", "metrics", "the real engine")
def test_metrics(server: SglangServer) -> None:
    """They are those of logitship's own server, beside SGLang's. Several tenants do not read the names of classes."""
    before = settled_metrics(server.url)
    with Client(server.url, timeout=300, headers={"x-tenant": "metrics"}) as client:
        generate(client, processor=NeedsNoParams)
        with pytest.raises((BadRequestError, GenerationError), match="token_id"):
            generate(client, processor=ForcesItsToken, params={})
    grown = growth(before, server.url, "", TOKENS + 1)
    assert grown("processor_rows_total", processor="other", origin="shipped") == TOKENS + 1
    assert grown("processor_call_duration_seconds_count", origin="shipped") == TOKENS + 1
    assert grown("processor_faults_total", processor="other", origin="shipped", kind="exception") == 1
    assert grown("processor_load_duration_seconds_count") == 2
    assert grown("tenant_step_seconds_total", tenant=tenant_of("metrics")) > 0
    assert read_metrics(server.url)("sandboxes_started_total") >= 4  # in the front end and in the scheduler
    assert "sglang:prompt_tokens_total" in httpx.get(f"{server.url}/metrics").text
    line = rf"request \S+ ends \(tenant {tenant_of('metrics')}, processor sha256:\w+\): .*ForcesItsToken"
    assert re.search(line, server.text)


def test_boost(client: Client) -> None:
    (plain,) = generate(client, tokens=1)
    boosted = [generate(client, tokens=1, processor=STRINGS["Boost"], params={"token_id": token}) for token in (5, 6)]
    assert all(answer in ([plain], [token]) for answer, token in zip(boosted, (5, 6), strict=True))


def test_countdown(client: Client) -> None:
    expected = [len(PROMPT) + step for step in range(TOKENS)]
    assert generate(client, processor=STRINGS["Countdown"]) == expected


def test_disallowed_tokens(client: Client) -> None:
    plain = generate(client)
    string = STRINGS["DisallowedTokensLogitsProcessor"]
    tokens = generate(client, processor=string, params={"token_ids": plain})
    assert not set(tokens) & set(plain)
    by_name = InstalledProcessor("disallowed_tokens")
    assert generate(client, processor=by_name, params={"token_ids": plain}) == tokens


@pytest.mark.parametrize("name", THINKING)
def test_thinking_budget(client: Client, name: str) -> None:
    """The prompt opens the thinking; after the budget come a new line and the end of the thinking."""
    start, end, newline = THINKING[name]
    tokens = generate(client, [start, 50, 51], processor=STRINGS[name], params={"thinking_budget": 5})
    assert tokens[3:5] == [newline, end]


def test_no_repeated_ngrams(client: Client) -> None:
    string = STRINGS["DeepseekOCRNoRepeatNGramLogitProcessor"]
    params = {"ngram_size": 1, "window_size": 100}
    tokens = generate(client, processor=string, params=params)
    assert len(set(tokens)) == TOKENS


def test_all_strings_are_tested() -> None:
    tested = {"ForceToken", "Boost", "Countdown"} | set(THINKING)
    assert set(STRINGS) == tested | {"DisallowedTokensLogitsProcessor", "DeepseekOCRNoRepeatNGramLogitProcessor"}


@pytest.mark.mode("SGLang", "chunked prefill", "the real engine")
@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["short", "in_chunks"])
def test_one_call_per_token(client: Client, prompt: str) -> None:
    tokens = generate(client, prompt, processor=CountsCalls, params={"first": FIRST})
    assert tokens == [FIRST + step for step in range(TOKENS)]


@pytest.mark.mode("SGLang", "overlap and normal scheduling", "the real engine")
def test_history_is_exact_in_a_busy_batch(server: SglangServer, client: Client, tokenizer: Tokenizer) -> None:
    """Requests of two processors and of none start together, are retracted, and go on."""
    prompts = [f"{number} {LONG_PROMPT[: 40 + 9 * number]}" for number in range(8)]
    last = 40
    with ThreadPoolExecutor(24) as pool:
        plain = list(pool.map(partial(generate, client, tokens=last), prompts))

    def hashed(prompt: str) -> tuple[list[int], int]:
        body = {
            "text": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": last + 1,
                "ignore_eos": True,
                "custom_params": {"last": last},
            },
            "custom_logit_processor": HashesHistory.to_str(),
        }
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).json()
        (receipt,) = answer["meta_info"]["receipts"]
        assert receipt["steps"] == last + 1
        return answer["output_ids"], answer["meta_info"]["num_retractions"]

    def retractions() -> int:
        """Run all requests at once, compare their tokens, and return how often those with checksums were retracted."""
        with ThreadPoolExecutor(24) as pool:
            answers = pool.map(hashed, prompts)
            counted = [
                pool.submit(generate, client, prompt, 30, processor=CountsCalls, params={"first": FIRST})
                for prompt in prompts
            ]
            others = pool.map(partial(generate, client, tokens=last), prompts)
            found = 0
            for prompt, expected, (tokens, retracted) in zip(prompts, plain, answers, strict=True):
                assert tokens == [*expected, history_token(tokenizer.encode(prompt), expected, last + 1)]
                found += retracted
            assert list(others) == plain
            assert [each.result() for each in counted] == [[FIRST + step for step in range(30)]] * len(prompts)
        return found

    assert any(retractions() for _ in range(8)), "SGLang retracts others if the requests do not meet"


@pytest.mark.mode("SGLang", "structured outputs beside processors", "the real engine")
def test_stop_strings_beside_grammars_end_only_their_requests(
    server: SglangServer, client: Client, tokenizer: Tokenizer
) -> None:
    """With a grammar in the batch, SGLang samples a step after it has looked for stop strings in the one before."""
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz")

    def stopped(number: int) -> tuple[str, int]:
        """Let a processor write the alphabet, up to a letter."""
        sampling = {"temperature": 0, "max_new_tokens": 26, "stop": chr(ord("a") + number), "ignore_eos": True}
        body = {
            "text": f"{number} {PROMPT}",
            "sampling_params": sampling | {"custom_params": {"first": letters[0]}},
            "custom_logit_processor": CountsCalls.to_str(),
        }
        meta = httpx.post(f"{server.url}/generate", json=body, timeout=300).json()["meta_info"]
        return meta["finish_reason"]["type"], meta["completion_tokens"]

    with ThreadPoolExecutor(16) as pool:
        constrained = [pool.submit(generate, client, tokens=40, regex="[a-z]{60}") for _ in range(2)]
        counted = [pool.submit(generate, client, tokens=40, processor=NeedsNoParams) for _ in range(4)]
        assert list(pool.map(stopped, range(8))) == [("stop", number + 1) for number in range(8)]
        assert [each.result() for each in counted] == [[FIRST + step for step in range(40)]] * 4
        for each in constrained:
            assert set(each.result()) <= set(letters)


def test_without_params(client: Client) -> None:
    assert generate(client, processor=NeedsNoParams) == [FIRST + step for step in range(TOKENS)]


def test_state_in_the_params_with_logprobs(client: Client) -> None:
    """Several requests at once, each with its own delay and token."""

    def answer(delay: int) -> list[int]:
        params = {"delay": delay, "token_id": FIRST + 100 * delay}
        generation = client.generate(
            PROMPT,
            temperature=0,
            max_new_tokens=TOKENS,
            ignore_eos=True,
            return_logprob=True,
            processor=WaitsInItsParams,
            params=params,
        )
        assert generation.logprobs is not None
        assert [each.token_id for each in generation.logprobs] == list(generation.output_ids)
        return list(generation.output_ids)

    plain = generate(client)
    with ThreadPoolExecutor(4) as pool:
        for delay, tokens in enumerate(pool.map(answer, range(4))):
            forced = [FIRST + 100 * delay + step for step in range(TOKENS - delay)]
            assert tokens == [*plain[:delay], *forced]


def logprob_tokens(server: SglangServer, processor: str | None, params: dict[str, Any] | None) -> list[int]:
    """Return the tokens of a greedy answer, from their log-probabilities."""
    body = {
        "text": "Question: Is Paris the Capital of France? Answer:",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "custom_params": params},
        "return_logprob": True,
        "custom_logit_processor": processor,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).json()
    return [token_id for _, token_id, *_ in answer["meta_info"]["output_token_logprobs"]]


def test_logprobs_show_the_forced_token(server: SglangServer) -> None:
    """Makes the request of SGLang's `test_custom_logit_processor`, and checks what that checks."""
    assert set(logprob_tokens(server, ForcesItsToken.to_str(), {"token_id": 5})) == {5}


def test_mixed_batch_keeps_tokens_apart(server: SglangServer) -> None:
    """Makes the 48 requests of SGLang's `test_custom_logit_processor_batch_mixed`: 32 tokens, 16 times none."""
    token_ids = [*range(32), *[None] * 16]
    random.Random(0).shuffle(token_ids)

    def tokens(token_id: int | None) -> set[int]:
        if token_id is None:
            return set(logprob_tokens(server, None, None))
        return set(logprob_tokens(server, ForcesItsToken.to_str(), {"token_id": token_id}))

    with ThreadPoolExecutor(len(token_ids)) as pool:
        found = list(pool.map(tokens, token_ids))
    plain = found[token_ids.index(None)]
    for token_id, each in zip(token_ids, found, strict=True):
        assert each == (plain if token_id is None else {token_id})


def test_mixed_batch_keeps_state_apart(server: SglangServer) -> None:
    """Makes the requests of SGLang's `test_stateful_custom_logit_processor_batch_mixed`.

    SGLang skips that test of its own: its processors may see the output one step late. The processor forces its token
    after two steps, and then always the one after the last token of its output.
    """
    token_ids = [*range(2, 34), *[None] * 16]
    random.Random(1).shuffle(token_ids)

    def tokens(token_id: int | None) -> list[int]:
        if token_id is None:
            return logprob_tokens(server, None, None)
        return logprob_tokens(server, WaitsInItsParams.to_str(), {"token_id": token_id, "delay": 2})

    with ThreadPoolExecutor(len(token_ids)) as pool:
        found = list(pool.map(tokens, token_ids))
    plain = found[token_ids.index(None)]
    for token_id, each in zip(token_ids, found, strict=True):
        expected = plain if token_id is None else [*plain[:2], *range(token_id, token_id + TOKENS - 2)]
        assert each == expected


@pytest.mark.mode("SGLang", "prefix cache", "the real engine")
def test_history_is_exact_after_a_prefix_cache_hit(server: SglangServer, client: Client, tokenizer: Tokenizer) -> None:
    """The second request computes only the end of its prompt, and its processor sees all of it."""
    prompt = f"cached: {LONG_PROMPT}"
    expected = generate(client, prompt, tokens=3)
    body = {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "custom_params": {"last": 3}},
        "custom_logit_processor": HashesHistory.to_str(),
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
    assert answer["meta_info"]["cached_tokens"] > len(prompt) // 2
    assert answer["output_ids"] == [*expected, history_token(tokenizer.encode(prompt), expected, 4)]


@pytest.mark.mode("SGLang", "`n`", "the real engine")
def test_continuations_have_separate_state(client: Client) -> None:
    answers = client.generate(
        PROMPT, n=2, max_new_tokens=TOKENS, ignore_eos=True, processor=CountsCalls, params={"first": FIRST}
    )
    assert [list(answer.output_ids) for answer in answers] == [[FIRST + step for step in range(TOKENS)]] * 2


def test_a_processor_for_each_prompt(client: Client) -> None:
    answers = client.generate(
        [PROMPT] * 2,
        processor=[STRINGS["ForceToken"], CountsCalls.to_str()],
        params=[{"token_id": 7}, {"first": FIRST}],
        max_new_tokens=2,
        ignore_eos=True,
    )
    assert [list(answer.output_ids) for answer in answers] == [[7, 7], [FIRST, FIRST + 1]]


def test_several_processors_run_in_order(client: Client) -> None:
    """The second one overrides the first."""
    forced = {"processor": STRINGS["ForceToken"], "params": {"token_id": 1234}}
    boosted = {"processor": STRINGS["Boost"], "params": {"token_id": 1235}}
    answer = client.generate(
        PROMPT, temperature=0, max_new_tokens=TOKENS, ignore_eos=True, logits_processors=[boosted, forced]
    )
    assert list(answer.output_ids) == [1234] * TOKENS
    assert [(receipt.name, receipt.steps) for receipt in answer.receipts] == [("Boost", TOKENS), ("ForceToken", TOKENS)]


def test_stream(client: Client) -> None:
    stream = client.generate_stream(
        PROMPT, max_new_tokens=TOKENS, ignore_eos=True, processor=CountsCalls, params={"first": FIRST}
    )
    chunks = list(stream)
    assert [token for chunk in chunks for token in chunk.output_ids] == [FIRST + step for step in range(TOKENS)]
    assert [receipt.steps for receipt in chunks[-1].receipts] == [TOKENS]


@pytest.mark.mode("SGLang", "OpenAI's routes", "the real engine")
@pytest.mark.parametrize("method", ["completions", "chat"])
def test_openai_routes(server: SglangServer, client: Client, method: str) -> None:
    prompt: Any = PROMPT if method == "completions" else [{"role": "user", "content": PROMPT}]
    options = {"processor": STRINGS["ForceToken"], "params": {"token_id": 70}, "max_tokens": 4}
    text = getattr(client, method)(prompt, **options).text
    assert text == chr(ord(text[0])) * 4
    with pytest.raises(GenerationError, match="as requested") as caught:
        getattr(client, method)(prompt, processor=faulty("raises"), max_tokens=9)
    assert caught.value.type == "ProcessorFault"


@pytest.fixture
def openai_client(server: SglangServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def send(client: openai.OpenAI, route: str, *, stream: bool, **extra: Any) -> Any:
    """Send a prompt for six tokens to a route of the openai SDK, with additional fields."""
    options: dict[str, Any] = {"stream": stream, "extra_body": extra}
    if route == "completions":
        return client.completions.create(model="m", prompt=PROMPT, max_tokens=6, **options)
    if route == "chat":
        messages = [{"role": "user", "content": PROMPT}]
        return client.chat.completions.create(model="m", messages=messages, max_tokens=6, **options)
    return client.responses.create(model=client.models.list().data[0].id, input=PROMPT, max_output_tokens=6, **options)


@with_overlap
@pytest.mark.parametrize("extra", [{}, {"response_format": {"type": "json_schema", "json_schema": ANY_OBJECT}}])
@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_openai_sdk_raises_for_a_fault(openai_client: openai.OpenAI, route: str, extra: dict[str, Any]) -> None:
    """The error has the author's traceback, in whole answers and in streams."""
    extra = {"custom_logit_processor": json.loads(faulty("raises")), **extra}
    with pytest.raises(openai.BadRequestError, match=r"ProcessorFault: processor Faulty(.|\n)*line 1\d, in __call__"):
        send(openai_client, route, stream=False, **extra)
    if route == "responses":
        *_, last = send(openai_client, route, stream=True, **extra)
        assert last.type == "response.failed"
        assert last.response.error.message.startswith("ProcessorFault: processor Faulty raised ValueError")
        return
    with pytest.raises(openai.APIError, match=r"ProcessorFault: processor Faulty(.|\n)*line 1\d, in __call__"):
        list(send(openai_client, route, stream=True, **extra))


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_receipts_on_openai_routes(openai_client: openai.OpenAI, route: str) -> None:
    """Each choice has its own, in a stream with its end. An answer without processors has none."""
    processor = {"custom_logit_processor": CountsCalls.to_str(), "custom_params": {"first": FIRST}}
    if route == "responses":
        whole = send(openai_client, route, stream=False, **processor)
        *_, last = send(openai_client, route, stream=True, **processor)
        for response in (whole, last.response):
            assert counted_steps(response.model_extra["receipts"]) == response.usage.output_tokens > 0
        return
    answer = send(openai_client, route, stream=False, n=2, **processor)
    assert [counted_steps(choice.model_extra["receipts"]) for choice in answer.choices] == [6, 6]
    choices = [each for event in send(openai_client, route, stream=True, n=2, **processor) for each in event.choices]
    found = {each.index: each.model_extra["receipts"] for each in choices if "receipts" in each.model_extra}
    assert {index: counted_steps(receipts) for index, receipts in found.items()} == {0: 6, 1: 6}
    assert "receipts" not in send(openai_client, route, stream=False).choices[0].model_extra


def counted_steps(receipts: Sequence[dict[str, Any]]) -> int:
    """Return the steps of the receipt of `CountsCalls`."""
    (receipt,) = receipts
    assert receipt.keys() == {"digest", "name", "steps", "milliseconds", "forced_steps"}
    assert (receipt["digest"], receipt["name"]) == (parse(CountsCalls.to_str()).digest, "CountsCalls")
    return int(receipt["steps"])


@pytest.mark.mode("SGLang", "`/v1/responses` and `/v1/messages`", "the real engine")
@with_overlap
def test_routes_that_drop_processors_run_them(server: SglangServer, openai_client: openai.OpenAI) -> None:
    sent = {"custom_logit_processor": json.loads(STRINGS["ForceToken"]), "custom_params": {"token_id": 70}}
    text = send(openai_client, "responses", stream=False, **sent).output_text
    assert text
    assert set(text) == {text[0]}
    events = send(openai_client, "responses", stream=True, **sent)
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == text
    body = {"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": PROMPT}]}
    message = httpx.post(f"{server.url}/v1/messages", json=body | sent, timeout=300).json()
    assert message["content"] == [{"type": "text", "text": text[0] * 6}]
    assert [receipt["steps"] for receipt in message["receipts"]] == [6]
    streamed = httpx.post(f"{server.url}/v1/messages", json=body | sent | {"stream": True}, timeout=300)
    lines = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    (delta,) = [event for event in lines if event["type"] == "message_delta"]
    assert [receipt["steps"] for receipt in delta["receipts"]] == [6]
    body["custom_logit_processor"] = faulty("raises")
    refused = httpx.post(f"{server.url}/v1/messages", json=body, timeout=300)
    assert refused.status_code == 400
    assert "Traceback" in refused.json()["error"]["message"]
    streamed = httpx.post(f"{server.url}/v1/messages", json=body | {"stream": True}, timeout=300)
    assert "event: error" in streamed.text
    assert "Traceback" in streamed.text


@with_overlap
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/encode"])
def test_routes_that_run_no_processors_refuse_them(server: SglangServer, path: str) -> None:
    body = {"model": "m", "input": "a", "text": "a", "query": "a", "items": ["b"], "label_token_ids": [5]}
    refused = httpx.post(f"{server.url}{path}", json=body | {"custom_logit_processor": "{}"}, timeout=60)
    assert refused.status_code == 400
    assert f"calls no processors on the route {path}" in refused.text


@with_overlap
def test_objects_are_as_good_as_their_text(server: SglangServer) -> None:
    forced = json.loads(STRINGS["ForceToken"])
    prompts, params = [PROMPT, PROMPT], {"max_new_tokens": 2, "custom_params": {"token_id": 70}}
    for text, processor in (
        (PROMPT, forced),
        (PROMPT, [{"processor": forced}]),
        (prompts, [forced, STRINGS["ForceToken"]]),
    ):
        body = {"text": text, "sampling_params": params, "custom_logit_processor": processor}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).json()
        assert [each["output_ids"] for each in (answer if isinstance(answer, list) else [answer])] == [[70, 70]] * (
            len(prompts) if text is prompts else 1
        )


class CountsForAll(CustomLogitProcessor):
    """Forces `FIRST` and the number of all calls of the class, for all requests that share it."""

    calls = 0

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, _ in enumerate(custom_param_list or ()):
            logits[row] = -float("inf")
            logits[row, FIRST + self.calls] = 0.0
            type(self).calls += 1
        return logits


@pytest.mark.mode("SGLang", "a tenant for each API key", "the real engine")
def test_tenants_share_no_class(server: SglangServer) -> None:
    """A class continues its own counting for each tenant."""

    def count(tenant: str) -> list[int]:
        with Client(server.url, timeout=300, headers={"X-Tenant": tenant}) as client:
            return generate(client, tokens=3, processor=CountsForAll)

    for first in (FIRST, FIRST + 3):
        for tenant in ("a", "b"):
            assert count(tenant) == [first, first + 1, first + 2]


SLOW_TO_LOAD = """
import time
from logitship import CustomLogitProcessor

time.sleep({seconds})

class Slow(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits
"""


def test_requests_go_on_while_a_class_is_loaded(client: Client) -> None:
    """It is loaded in the front end, and then in the scheduler, where its request waits outside of the batch."""
    seconds = 4
    slow = json.dumps({"source": SLOW_TO_LOAD.format(seconds=seconds), "class_name": "Slow"})
    durations = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, client, processor=slow)
        while not waiting.done():
            begin = time.monotonic()
            generate(client, tokens=1)
            durations.append(time.monotonic() - begin)
        assert waiting.result() == generate(client)
    assert sum(durations) > 2 * seconds
    assert max(durations) < seconds


@pytest.mark.mode("SGLang", "sampling masks with any processor", "the real engine")
@with_overlap
def test_sampling_masks(server: SglangServer) -> None:
    """SGLang alone refuses them with all processors but one, which it unpickles to find out."""
    body = {
        "text": PROMPT,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "top_k": 4, "top_p": 0.95, "temperature": 0.8},
    }
    shipped = {"custom_logit_processor": OnlyEven.to_str()}
    for processor in ({}, shipped):
        answer = httpx.post(f"{server.url}/generate", json=body | processor, timeout=60).raise_for_status().json()
        meta, tokens = answer["meta_info"], answer["output_ids"]
        masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
        assert len(masks) == len(tokens) == 8
        assert all(token in mask for token, mask in zip(tokens, masks, strict=True))
        assert all(len(mask) <= 4 for mask in masks)
        assert all(sum(map(math.exp, each)) == pytest.approx(1, abs=1e-4) for each in logprobs)
        assert processor is not shipped or all(token % 2 == 0 for mask in masks for token in mask)


@with_overlap
def test_masks_are_those_of_the_own_engine(server: SglangServer, model_folder: Path) -> None:
    """First tokens alone: their masks do not depend on what is sampled."""
    prompts = [[84 + number, 71, 88] for number in range(10)]
    cases = [{"top_k": 20}, {"top_p": 0.002}, {"top_k": 5, "temperature": 1.5}]
    llm = LLM(model=str(model_folder), dtype="float32")
    for fields, banned in [(case, None) for case in cases] + [(cases[0], [*range(70, 80)])]:
        body: dict[str, Any] = {
            "input_ids": prompts,
            "return_sampling_mask": True,
            "sampling_params": {"max_new_tokens": 1, **fields},
        }
        processors = ()
        if banned is not None:
            body["custom_logit_processor"] = STRINGS["DisallowedTokensLogitsProcessor"]
            body["sampling_params"]["custom_params"] = {"token_ids": banned}
            processors = ({"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": banned}},)
        answers = httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status().json()
        params = SamplingParams(
            max_tokens=1,
            return_sampling_mask=True,
            logits_processors=processors,
            **fields,
        )
        own = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for answer, output in zip(answers, own, strict=True):
            (mask,) = answer["meta_info"]["output_token_sampling_mask"]
            assert mask == output.outputs[0].sampling_record.kept.tolist()


@pytest.mark.mode("SGLang", "packed sampling masks and edits", "the real engine")
@with_overlap
def test_trainer_gets_the_log_probabilities_of_random_requests(client: Client, bare_model: LlamaForCausalLM) -> None:
    """From the model's own logits, and as many requests as fit at a time, whole and as streams."""
    rng = random.Random(0)
    requests = [random_request(rng, range(70, 120), least=1) for _ in range(60)]

    for options, record in answered(client, PROMPT_IDS, requests, max_new_tokens=6, ignore_eos=True):
        tokens = record.token_ids.tolist()
        assert len(tokens) == 6
        with torch.inference_mode():
            logits = bare_model(torch.tensor([PROMPT_IDS + tokens])).logits[0, len(PROMPT_IDS) - 1 : -1]
        found = logitship.replay.replay(logits, record)
        np.testing.assert_allclose(found.numpy(), record.logprobs, atol=2e-5, err_msg=str(options))


@with_overlap
@pytest.mark.parametrize(
    ("processor", "params", "message"),
    [
        ("{nonsense", {}, "the processor string is not JSON"),
        ('{"callable": "80"}', {}, "truncated or damaged"),
        (CannotLoad, {}, "no instance of this"),
        (json.dumps({"source": "x" * 60000, "class_name": "A"}), {}, "takes at most 60000"),
        (InstalledProcessor("nobody"), {}, "nobody"),
        (InstalledProcessor("disallowed_tokens"), {"token_ids": "x"}, "parameters of disallowed_tokens"),
    ],
)
def test_what_cannot_run_is_refused(client: Client, processor: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        generate(client, processor=processor, params=params)


def test_faults_end_only_their_requests(server: SglangServer, client: Client) -> None:
    """Every kind of fault, a few at a time, beside sixteen streams that don't notice."""
    prompts = [f"{number} {PROMPT}" for number in range(16)]
    with ThreadPoolExecutor(24) as pool:
        alone = list(pool.map(partial(generate, client, tokens=60), prompts))

    def fault(kind: str) -> GenerationError:
        with pytest.raises(GenerationError) as caught:
            generate(client, tokens=9, processor=faulty(kind))
        return caught.value

    kinds = list(FAULTS)
    with ThreadPoolExecutor(24) as pool:
        for start in range(0, len(kinds), 7):
            others = [pool.submit(generate, client, prompt, tokens=60) for prompt in prompts]
            counted = pool.submit(generate, client, processor=CountsCalls, params={"first": FIRST})
            faults = [pool.submit(fault, kind) for kind in kinds[start : start + 7]]
            assert [each.result().type for each in faults] == ["ProcessorFault"] * len(faults)
            assert [each.result() for each in others] == alone
            assert counted.result() == [FIRST + step for step in range(TOKENS)]
    assert server.is_alive()


@with_overlap
@pytest.mark.parametrize("attempt", ESCAPES)
def test_escape_is_prevented(server: SglangServer, client: Client, attempt: str) -> None:
    """A sandbox that the kernel ends for the attempt is as good as an error."""
    port = int(server.url.rpartition(":")[2])
    try:
        assert generate(client, tokens=1, processor=escaping(attempt, port)) == [PREVENTED]
    except GenerationError as error:
        assert error.type == "ProcessorFault"  # noqa: PT017
    assert server.is_alive()


def test_escapes_succeed_without_a_sandbox() -> None:
    """The control, for the attempts that need no privileges and do not end their process."""
    program = "import ctypes, os, socket, subprocess\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for attempt in ("read the passwords", "connect to SGLang", "run a program", "run a shell", "fork"):
            code = program + ESCAPES[attempt].replace("{port}", str(port))
            assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, attempt


@with_overlap
def test_doctor_finds_the_plugin(server: SglangServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor_command("sglang", server.url, None) == 0
    assert "SGLang:             0.5.23" in capsys.readouterr().out


def test_fault_has_its_traceback(client: Client) -> None:
    with pytest.raises(GenerationError, match="processor Faulty raised ValueError: as requested") as caught:
        generate(client, processor=faulty("raises"))
    assert "raise ValueError" in caught.value.traceback or "line 11" in caught.value.traceback


def test_fault_in_a_stream_comes_after_the_tokens(client: Client) -> None:
    ids: list[int] = []
    with pytest.raises(GenerationError, match="as requested"):  # noqa: PT012
        for chunk in client.generate_stream(PROMPT, temperature=0, max_new_tokens=9, processor=faulty("raises")):
            ids += chunk.output_ids
    assert ids == generate(client, tokens=2)


class _Loads:
    """Its pickle calls `Fraction` when it is loaded."""

    def __reduce__(self) -> Any:
        return Fraction, (1, 2)


LOADS = json.dumps({"callable": pickle.dumps(_Loads()).hex()})


def test_no_process_unpickles(server: SglangServer, client: Client) -> None:
    """The name in the pickle is not looked up in any process of SGLang; SGLang's own pickles are recorded."""
    for options in ({}, {"return_sampling_mask": True}):
        body = {"text": PROMPT, "custom_logit_processor": LOADS, "sampling_params": {"max_new_tokens": 3}} | options
        assert httpx.post(f"{server.url}/generate", json=body, timeout=60).status_code == 400
    generate(client, processor=CountsCalls, params={"first": FIRST})
    recorded = audited(server)
    assert recorded
    assert not [name for name in recorded if name.startswith(("fractions.", "dill.", "logitship.client"))]


def audited(server: SglangServer) -> list[str]:
    """Return the names that pickles have looked up in all processes of the server."""
    environment = Path(f"/proc/{server.process.pid}/environ").read_bytes().decode().split("\0")
    (path,) = (each.partition("=")[2] for each in environment if each.startswith("LOGITSHIP_TEST_AUDIT="))
    return Path(path).read_text().splitlines()


@pytest.fixture
def stock(tmp_path: Path, sglang_python: Path, model_folder: Path, folders: list[Path]) -> Iterator[SglangServer]:
    """SGLang that leaves out the plugin."""
    environment = {"LOGITSHIP_TEST_AUDIT": str(tmp_path / "audit"), "SGLANG_PLUGINS": "none"}
    with sglang_serve(sglang_python, model_folder, folders, environment) as server:
        yield server


def test_wrong_setting_refuses_processors(
    tmp_path: Path, sglang_python: Path, model_folder: Path, folders: list[Path]
) -> None:
    """A plugin that cannot be installed completely: nothing is unpickled, and other requests run."""
    environment = {"LOGITSHIP_TEST_AUDIT": str(tmp_path / "audit"), "LOGITSHIP_SGLANG_SANDBOX_MEMROY": "1"}
    with sglang_serve(sglang_python, model_folder, folders, environment) as server:
        assert "LOGITSHIP_SGLANG_SANDBOX_MEMROY: there is no such setting" in server.text
        for options in ({}, {"return_sampling_mask": True}):
            body = {"text": PROMPT, "custom_logit_processor": LOADS, "sampling_params": {"max_new_tokens": 3}} | options
            refused = httpx.post(f"{server.url}/generate", json=body, timeout=60)
            assert refused.status_code == 400
            assert "logitship refuses custom logit processors" in refused.text
        assert server.is_alive()
        assert not [name for name in audited(server) if name.startswith(("fractions.", "dill."))]


@pytest.fixture(scope="module")
def eagle_head(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A random draft model of EAGLE: a layer that reads the model's embeddings and hidden states."""
    config = LlamaConfig.from_pretrained(model_folder)
    config.num_hidden_layers = 1
    torch.manual_seed(1)
    weights = LlamaForCausalLM(config).model.layers.state_dict()
    weights = {f"layers.{name}": value for name, value in weights.items() if "input_layernorm" not in name}
    weights["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size)
    weights["fc.bias"] = torch.zeros(config.hidden_size)
    folder = tmp_path_factory.mktemp("eagle")
    config.architectures = ["LlamaForCausalLMEagle"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.mode(
    "SGLang",
    "drafts of NGRAM, STANDALONE and EAGLE, with overlap and normal scheduling",
    "the real engine, with torch in place of kernels",
)
@pytest.mark.parametrize("scheduling", ["overlap", "normal"])
@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE", "EAGLE"])
def test_speculation(
    algorithm: str,
    scheduling: str,
    tmp_path: Path,
    sglang_python: Path,
    model_folder: Path,
    eagle_head: Path,
    folders: list[Path],
    tokenizer: Tokenizer,
) -> None:
    """Processors see exactly the tokens that SGLang accepts of its drafts, and change nothing else."""
    add_distribution(tmp_path, "tree_attention", "tree_attention:load")
    kernels = Path(__file__).with_name("sglang_kernels")
    arguments = ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", "6"]
    if algorithm != "NGRAM":
        draft_model = model_folder if algorithm == "STANDALONE" else eagle_head
        arguments += ["--speculative-draft-model-path", str(draft_model), "--speculative-num-steps", "3"]
        arguments += ["--speculative-eagle-topk", "2"]
    # A CPU has no overlap by itself, and Python in place of kernels is slow.
    environment = {"LOGITSHIP_TEST_OVERLAP": "1", "LOGITSHIP_SGLANG_STEP_SHARE": "100"}
    if scheduling == "normal":
        arguments.append("--disable-overlap-schedule")
    with (
        sglang_serve(sglang_python, model_folder, [kernels, tmp_path, *folders], environment, *arguments) as server,
        Client(server.url, timeout=300) as client,
    ):
        assert f"with {scheduling} scheduling" in server.text

        def answer(tokens: int, prompt: str, processor: str, params: dict[str, Any]) -> tuple[list[int], int, int]:
            """Return the tokens, the number of calls, and the number of steps with drafts."""
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": params}
            body = {"text": prompt, "sampling_params": sampling, "custom_logit_processor": processor}
            answered = httpx.post(f"{server.url}/generate", json=body, timeout=300)
            assert answered.status_code == 200, answered.text
            meta = answered.json()["meta_info"]
            return answered.json()["output_ids"], meta["receipts"][0]["steps"], meta["spec_verify_ct"]

        def fault(kind: str) -> str | None:
            with pytest.raises(GenerationError) as caught:
                generate(client, tokens=9, processor=faulty(kind))
            return caught.value.type

        prompts = [f"{number} {PROMPT}" for number in range(20)]
        plain = [generate(client, prompt, tokens=30) for prompt in prompts]
        string, checksum = CountsCalls.to_str(), HashesHistory.to_str()
        answer(30, PROMPT, string, {"first": FIRST})
        with ThreadPoolExecutor(len(prompts) + 8) as pool:
            counted = pool.submit(answer, 30, PROMPT, string, {"first": FIRST})
            hashed = [pool.submit(answer, 31, prompt, checksum, {"last": 30}) for prompt in prompts]
            others = [pool.submit(generate, client, prompt, tokens=30) for prompt in prompts[:4]]
            faults = [pool.submit(fault, kind) for kind in ("raises", "exits", "leaves a NaN")]
            tokens, calls, steps = counted.result()
            assert tokens == [FIRST + step for step in range(30)]
            assert calls == 30
            if algorithm == "NGRAM":  # it finds what the processor forced, which a draft model does not know
                assert steps < 20
            for prompt, expected, each in zip(prompts, plain, hashed, strict=True):
                tokens, calls, steps = each.result()
                assert tokens == [*expected, history_token(tokenizer.encode(prompt), expected, 31)]
                assert calls == 31
                if algorithm != "EAGLE":  # a random head guesses nothing
                    assert steps < 25  # with drafts that were accepted
            assert [each.result() for each in others] == plain[:4]
            assert [each.result() for each in faults] == ["ProcessorFault"] * 3
        name = "Qwen3ThinkingBudgetLogitProcessor"
        start, end, newline = THINKING[name]
        tokens = generate(client, [start, 50, 51], processor=STRINGS[name], params={"thinking_budget": 5})
        assert tokens[3:5] == [newline, end]
        assert server.is_alive()


def test_stock_sglang_unpickles_and_dies(stock: SglangServer) -> None:
    """The control: the recorder records, the client warns, and one fault ends the server."""
    assert run_doctor_command("sglang", stock.url, None) == 1
    assert not [name for name in audited(stock) if name.startswith("dill.")]
    with Client(stock.url, timeout=240, max_retries=0) as client:  # on a busy machine it takes a while to die
        with pytest.warns(UserWarning, match="unpickles processors"):
            assert len(generate(client, processor=STRINGS["ForceToken"], params={"token_id": 5})) == TOKENS
        assert any(name.startswith("dill.") for name in audited(stock))
        with pytest.raises(TransportError, match=r"disconnected|refused|reset|closed"):
            generate(client, processor=CountsCalls, params={})
    assert not stock.is_alive()


def test_broken_installation_refuses_processors(
    tmp_path: Path, sglang_python: Path, model_folder: Path, folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A logitship whose package cannot be imported: nothing is unpickled, and `logitship doctor` says so."""
    (tmp_path / "logitship").mkdir()
    (tmp_path / "logitship" / "__init__.py").write_text("import a_missing_dependency")
    package = Path(__file__).parents[2] / "src"
    environment = {
        "LOGITSHIP_TEST_AUDIT": str(tmp_path / "audit"),
        "PYTHONPATH": os.pathsep.join(map(str, [tmp_path, package, *folders])),
    }
    with sglang_serve(sglang_python, model_folder, folders, environment) as server:
        assert "No module named 'a_missing_dependency'" in server.text
        for options in ({}, {"return_sampling_mask": True}):
            body = {"text": PROMPT, "custom_logit_processor": LOADS, "sampling_params": {"max_new_tokens": 3}} | options
            refused = httpx.post(f"{server.url}/generate", json=body, timeout=60)
            assert refused.status_code == 400
            assert "logitship refuses custom logit processors" in refused.text
        assert server.is_alive()
        assert not [name for name in audited(server) if name.startswith(("fractions.", "dill."))]
        assert run_doctor_command("sglang", server.url, None) == 0
        assert "logitship's plugin: could not be installed" in capsys.readouterr().out
