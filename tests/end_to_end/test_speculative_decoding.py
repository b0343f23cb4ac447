"""Speculative decoding with `--enable-deterministic-inference` changes no token on a real model.

Each kind of processor gets one prompt. `LOGITSHIP_PROMPTS_EACH=12` makes it twelve, which is hundreds of prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from logitship.client.serialization.processor_string import PYTHON, InstalledProcessor, SourceProcessor, parse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.config import ServerConfig
from logitship.server.engine import build
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.requests.messages import GenerationRequest, ProcessorRequest
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.ngram_speculation import NGramSpeculation

STRINGS: dict[str, str] = json.loads((Path(__file__).parents[1] / "data" / "sglang_strings.json").read_text())[
    "strings"
][PYTHON]
PROMPTS_EACH = int(os.environ.get("LOGITSHIP_PROMPTS_EACH", "1"))
LENGTH = 16
WORDS = ["the", "a", "red", "blue", "bird", "dog", "sings", "runs", "of", "and", "house", "old", "river", "says", "was"]

STATEFUL = SourceProcessor(
    """
from logitship import CustomLogitProcessor

class Stateful(CustomLogitProcessor):
    '''Depends on the number of its calls and on earlier logits, and detects extra calls.'''
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            req = params["__req__"]
            calls = req.state["calls"] = req.state.get("calls", 0) + 1
            params["seen"].append(len(req.output_ids))
            assert params["seen"] == list(range(calls))
            if calls % 5 == 0:
                row[req.state["best"]] -= 4.0
            req.state["best"] = int(row.argmax())
        return logits
""",
    "Stateful",
)


def named(name: str, **params: Any) -> ProcessorRequest:
    return ProcessorRequest(InstalledProcessor(name), params)


def shipped(name: str, params: dict[str, Any] | None) -> ProcessorRequest:
    return ProcessorRequest(parse(STRINGS[name]), params)


TREE = {"start_token_id": 9, "end_token_id": 2, "prefix_dict": {"9": [100, 200], "9_100": [300, 400], "9_100_300": [2]}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
CASES: dict[str, tuple[dict[str, Any], list[ProcessorRequest]]] = {
    "plain": ({}, []),
    "random": ({"temperature": 0.8, "top_p": 0.95, "seed": 1}, []),
    "penalties": ({"repetition_penalty": 1.1, "frequency_penalty": 0.1}, []),
    "min_p and bias": ({"temperature": 1.0, "min_p": 0.05, "seed": 2, "logit_bias": {28: 2.0}}, []),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": [28, 30, 281, 260]}, []),
    "thinking_token_budget": ({"thinking_token_budget": 4}, []),
    "ForceToken": ({}, [shipped("ForceToken", {"token_id": 1234})]),
    "Boost": ({}, [shipped("Boost", {"token_id": 281})]),
    "Countdown": ({}, [shipped("Countdown", None)]),
    "DisallowedTokens": ({}, [shipped("DisallowedTokensLogitsProcessor", {"token_ids": [28, 30, 260]})]),
    "DeepseekOCR": (
        {},
        [shipped("DeepseekOCRNoRepeatNGramLogitProcessor", {"ngram_size": 3, "window_size": 90})],
    ),
    "stateful": ({}, [ProcessorRequest(STATEFUL, {"seen": []})]),
    "stateful, random": ({"temperature": 0.7, "seed": 3}, [ProcessorRequest(STATEFUL, {"seen": []})]),
    "disallowed_tokens": ({}, [named("disallowed_tokens", token_ids=[28, 30, 260])]),
    "no_repeat_ngram": ({}, [named("no_repeat_ngram", ngram_size=4, window_size=60)]),
    "thinking_budget": ({}, [named("thinking_budget", thinking_budget=5, start=[1], end=[2, 198], newline=[198])]),
    "think_mode": ({}, [named("think_mode", max_thinking_tokens=6, end_think_token_ids=[198, 2])]),
    "strict_think_mode": ({}, [named("strict_think_mode", max_thinking_tokens=6, end_think_token_ids=[198, 2])]),
    "multi_sequence": ({}, [named("multi_sequence")]),
    "tree": ({}, [named("tree", tree=TREE)]),
    "json schema": ({}, [named("grammar", json_schema=SCHEMA)]),
    "regex": ({}, [named("grammar", regex="(the [a-z]+ (sings|runs)\\\\. ?){2,9}")]),
    "gen_length": ({}, [named("gen_length", boost_factor=0.1)]),
    "cite_from_prompt": ({}, [named("cite_from_prompt", boost_factor=2.0, conditional_boost_factor=1.0)]),
    "force_last_phrase": ({}, [named("force_last_phrase", phrase="Bye.")]),
    "multiple_choice": ({"max_tokens": 1}, [named("multiple_choice")]),
    "prevent_hallucination": ({}, [named("prevent_hallucination", phrase="I do not know.", minp=0.3, tolerate=2)]),
    "trigger_phrase": ({}, [named("trigger_phrase", phrase=" indeed", trigger_token_phrase=" the")]),
}
"""Left out: `max_time`, which reads the clock, and the thinking budgets of other models, which need their tokens."""


def prompts(engine: AsyncEngine) -> list[tuple[str, list[int]]]:
    """Return repetitive texts, for which there are drafts."""
    generator = random.Random(7)
    made = []
    for number in range(PROMPTS_EACH):
        for name in CASES:
            sentences = [" ".join(generator.choices(WORDS, k=generator.randrange(3, 7))) for _ in range(2)]
            text = ". ".join(generator.choice(sentences) for _ in range(6))
            made.append((f"{name} {number}", engine.tokenizer.encode(text)))
    return made


def outputs(engine: AsyncEngine) -> dict[str, tuple[list[int], str]]:
    """Return the tokens and the finish reason of each request."""

    async def generated(rid: str, prompt: list[int]) -> tuple[list[int], str]:
        params, processors = CASES[rid.rpartition(" ")[0]]
        defaults = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
        request = GenerationRequest(
            rid=rid,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**(defaults | params)),
            processors=tuple(processors),
        )
        tokens: list[int] = []
        async for chunk in await engine.submit(request):
            tokens += chunk.token_ids
            reason = chunk.finish_reason
        assert reason is not None
        return tokens, f"{reason.kind}: {reason.error and reason.error.message}"

    async def generate_all() -> dict[str, tuple[list[int], str]]:
        requests = prompts(engine)
        results = await asyncio.gather(*(generated(rid, prompt) for rid, prompt in requests))
        return {rid: each for (rid, _), each in zip(requests, results, strict=True)}

    return asyncio.run(generate_all())


class Counted(NGramSpeculation):
    """Always drafts, regardless of cost, and counts accepted draft tokens."""

    accepted = 0

    def __init__(self, num_draft_tokens: int, step_cost: object) -> None:
        super().__init__(num_draft_tokens, lambda num_tokens: 1.0)
        self._lengths: dict[Sequence, int] = {}

    def drafts(self, decoding: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        decoding = list(decoding)
        for sequence in decoding:
            length = len(sequence.output_token_ids)
            Counted.accepted += max(0, length - self._lengths.get(sequence, length) - 1)
            self._lengths[sequence] = length
        return super().drafts(decoding)

    def observe(self, num_rows: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        super().observe(num_rows, num_drafts, num_accepted, 1.0)  # a busy machine must not turn drafting off


def outputs_of_engine(model: str, **settings: Any) -> dict[str, tuple[list[int], str]]:
    engine = build.build_engine(
        ServerConfig(
            model_path=model,
            enable_custom_logit_processor=True,
            reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
            max_model_len=256,
            max_queued_requests=10_000,
            enable_deterministic_inference=True,
            **settings,
        )
    )
    try:
        return outputs(engine)
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def plain(shallow_model: str) -> dict[str, tuple[list[int], str]]:
    """The outputs without drafts, from shipped code in sandboxes: those of both isolations are the same."""
    return outputs_of_engine(shallow_model, processor_isolation="sandbox")


@pytest.mark.parametrize("isolation", ["none", "sandbox"])
def test_speculative_decoding_changes_no_token(
    isolation: str, monkeypatch: pytest.MonkeyPatch, shallow_model: str, plain: dict[str, tuple[list[int], str]]
) -> None:
    monkeypatch.setattr(build, "NGramSpeculation", Counted)
    Counted.accepted = 0
    drafted = outputs_of_engine(shallow_model, processor_isolation=isolation, speculative_algorithm="NGRAM")
    assert drafted == plain
    assert {reason for _, reason in plain.values()} <= {"length: None", "stop: None"}
    assert Counted.accepted > len(plain)
