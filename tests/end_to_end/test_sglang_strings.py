"""Processor strings recorded from SGLang, over HTTP."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from logitship.client.serialization.processor_string import PYTHON
from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel

STRINGS: dict[str, str] = json.loads((Path(__file__).parents[1] / "data" / "sglang_strings.json").read_text())[
    "strings"
][PYTHON]
PROMPT = "The quick brown fox"
THINKING = {
    # name: start of thinking, end of thinking, new line
    "Qwen3ThinkingBudgetLogitProcessor": (151667, 151668, 198),
    "DeepSeekR1ThinkingBudgetLogitProcessor": (128798, 128799, 201),
    "Glm4MoeThinkingBudgetLogitProcessor": (151350, 151351, 198),
    "InklingThinkingBudgetLogitProcessor": (200008, 200010, 198),
}


def generate(base_url: str, name: str | None, custom_params: dict[str, Any] | None, **body: Any) -> dict[str, Any]:
    """Request a greedy answer of 12 tokens as SGLang's own clients do."""
    body = {"text": PROMPT} | body
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "custom_params": custom_params}
    body["sampling_params"] = sampling | body.get("sampling_params", {})
    if name is not None:
        body["custom_logit_processor"] = STRINGS[name]
    answer = httpx.post(f"{base_url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def test_all_strings_are_tested() -> None:
    tested = {"ForceToken", "Boost", "Countdown"} | set(THINKING)
    tested |= {"DisallowedTokensLogitsProcessor", "DeepseekOCRNoRepeatNGramLogitProcessor"}
    assert set(STRINGS) == tested


def test_force_token(real_server: str) -> None:
    answer = generate(real_server, "ForceToken", {"token_id": 1234})
    assert answer["output_ids"] == [1234] * 12
    (receipt,) = answer["meta_info"]["receipts"]
    assert (receipt["name"], receipt["steps"]) == ("ForceToken", 12)


def test_boost(real_server: str) -> None:
    """The boosted token gains 7.5 against any other; the processor returns float64."""
    options = {"return_logprob": True, "top_logprobs_num": 20, "sampling_params": {"max_new_tokens": 1}}
    options["sampling_params"] |= {"logprobs_mode": "processed_logprobs"}
    plain = generate(real_server, None, None, **options)
    (top,) = plain["meta_info"]["output_top_logprobs"]
    (best, best_id, _), (tenth, tenth_id, _) = top[0], top[9]
    boosted = generate(real_server, "Boost", {"token_id": tenth_id}, **options)
    (boosted_top,) = boosted["meta_info"]["output_top_logprobs"]
    after = {token_id: logprob for logprob, token_id, _ in boosted_top}
    assert (after[tenth_id] - after[best_id]) - (tenth - best) == pytest.approx(7.5, abs=1e-3)


def test_countdown(real_server: str) -> None:
    answer = generate(real_server, "Countdown", None)
    prompt_length = answer["meta_info"]["prompt_tokens"]
    assert answer["output_ids"] == [prompt_length + step for step in range(12)]


def test_disallowed_tokens(real_server: str) -> None:
    plain = generate(real_server, None, None)
    forbidden = plain["output_ids"][:3]
    answer = generate(real_server, "DisallowedTokensLogitsProcessor", {"token_ids": forbidden})
    assert not set(forbidden) & set(answer["output_ids"])


def test_no_repeat_ngram(real_server: str) -> None:
    """The prompt repeats itself, the answer must not."""
    options: dict[str, Any] = {"text": "one two three one two three one two three one two"}
    plain = generate(real_server, None, None, **options)
    params = {"ngram_size": 3, "window_size": 200}
    answer = generate(real_server, "DeepseekOCRNoRepeatNGramLogitProcessor", params, **options)

    def trigrams(ids: list[int]) -> list[tuple[int, ...]]:
        return list(zip(ids, ids[1:], ids[2:], strict=False))

    assert len(set(trigrams(plain["output_ids"]))) < 10
    assert len(set(trigrams(answer["output_ids"]))) == 10


@pytest.fixture(scope="module")
def large_vocabulary_server(loaded_model: LoadedModel) -> Iterator[str]:
    """Base URL of a server on a tiny model whose vocabulary has the token ids of all four thinking models."""
    config = LlamaConfig(
        vocab_size=200_020,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    loaded = dataclasses.replace(loaded_model, model=model, vocab_size=config.vocab_size, max_len=128)
    settings = ServerConfig(model_path="tiny", max_num_seqs=2, port=0, log_level="warning")
    with running_server(settings, build_engine(settings, loaded)) as base_url:
        yield base_url


@pytest.mark.parametrize("name", THINKING)
def test_thinking_budget(large_vocabulary_server: str, name: str) -> None:
    """The answer is five tokens of thinking, then the forced new line and end of thinking.

    These strings ship no code, so the server needs no flag for them.
    """
    start, end, new_line = THINKING[name]
    prompt = {"text": None, "input_ids": [1000, start]}
    plain = generate(large_vocabulary_server, None, None, **prompt)
    assert end not in plain["output_ids"]
    answer = generate(large_vocabulary_server, name, {"thinking_budget": 5}, **prompt)
    assert answer["output_ids"][:5] == plain["output_ids"][:5]
    assert answer["output_ids"][5:7] == [new_line, end]
    assert end not in answer["output_ids"][7:]


def test_model_without_thinking_tokens(real_server: str) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"custom_params": {"thinking_budget": 5}},
        "custom_logit_processor": STRINGS["Qwen3ThinkingBudgetLogitProcessor"],
    }
    answer = httpx.post(f"{real_server}/generate", json=body)
    assert answer.status_code == 400
    assert "151667" in answer.json()["error"]["message"]
