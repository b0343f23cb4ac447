"""Thinking budgets through the whole engine, on the tiny model: token 2 is <think>, token 3 is </think>."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import (
    AttachedProcessor,
    FinishReason,
    GenerationRequest,
    ProcessorRequest,
)

BuildEngine = Callable[..., AsyncEngine]

THINK, END = 2, 3
HELLO = [4 + byte for byte in b"hello"]
CONFIG = {"reasoning_parser": "qwen3"}

OVERRULE = SourceProcessor(
    """
from logitship import CustomLogitProcessor

class Overrule(CustomLogitProcessor):
    '''Masks a token.'''
    def __call__(self, logits, custom_param_list=None):
        logits[:, custom_param_list[0]["token"]] = -float("inf")
        return logits
""",
    "Overrule",
)


def request(
    rid: str, budget: int | None, *processors: AttachedProcessor, prompt: list[int] | None = None, **params: Any
) -> GenerationRequest:
    defaults = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, "thinking_token_budget": budget}
    return GenerationRequest(
        rid=rid,
        prompt_token_ids=[THINK, *HELLO] if prompt is None else prompt,
        sampling_params=SamplingParams(**(defaults | params)),
        processors=processors,
    )


async def generated(engine: AsyncEngine, wanted: GenerationRequest) -> tuple[list[int], FinishReason | None]:
    found: list[int] = []
    async for chunk in await engine.submit(wanted):
        found += chunk.token_ids
        last = chunk
    return found, last.finish_reason


def run(engine: AsyncEngine, *wanted: GenerationRequest) -> list[tuple[list[int], FinishReason | None]]:
    async def bounded() -> list[tuple[list[int], FinishReason | None]]:
        async with asyncio.timeout(120):
            return list(await asyncio.gather(*(generated(engine, each) for each in wanted)))

    return asyncio.run(bounded())


def test_rows_with_and_without_budgets(make_engine: BuildEngine) -> None:
    engine = make_engine(reasoning_config=CONFIG, max_num_seqs=8)
    plain, unlimited, none_left, seven, answering, random = (
        tokens
        for tokens, _ in run(
            engine,
            request("plain", None),
            request("unlimited", -1),
            request("none left", 4),
            request("seven", 7),
            request("answering", 0, prompt=HELLO),
            request("random", 6, temperature=1.0, seed=5),
        )
    )
    assert END not in plain
    assert unlimited == plain
    assert none_left[0] == END
    assert (seven[:2], seven[2]) == (plain[:2], END)
    assert (random[1], len(random)) == (END, 12)
    assert END not in answering
    assert run(make_engine(), request("alone", None)) == run(engine, request("plain", None))


def test_end_marker_of_several_tokens(make_engine: BuildEngine) -> None:
    engine = make_engine(reasoning_config={**CONFIG, "reasoning_end_str": "So.</think>"})
    ((tokens, _),) = run(engine, request("a", 5))
    assert tokens[:4] == [*engine.tokenizer.encode("So."), END]


@pytest.mark.parametrize(
    ("processor", "params", "involved"),
    [
        (ProcessorRequest(InstalledProcessor("disallowed_tokens"), {"token_ids": [END]}), {}, "disallowed_tokens"),
        (ProcessorRequest(OVERRULE, {"token": END}), {}, "Overrule"),
        (None, {"allowed_token_ids": HELLO}, "allowed_token_ids"),
    ],
)
def test_error_names_what_masks_the_end_marker(
    make_engine: BuildEngine, processor: ProcessorRequest | None, params: dict[str, Any], involved: str
) -> None:
    engine = make_engine(reasoning_config=CONFIG)
    processors = () if processor is None else (processor,)
    (stopped, reason), (other, _) = run(engine, request("a", 7, *processors, **params), request("b", 7))
    assert len(stopped) == 2
    assert reason is not None
    assert reason.error is not None
    assert involved in reason.error.message
    assert "thinking_token_budget" in reason.error.message
    assert len(other) == 12


def test_budget_is_refused_without_reasoning_config(make_engine: BuildEngine) -> None:
    engine = make_engine()
    with pytest.raises(BadRequest, match=r"start it with --reasoning-config '\{\"reasoning_start_str\"") as refused:
        run(engine, request("a", 7))
    assert refused.value.param == "thinking_token_budget"
    assert len(run(engine, request("b", -1))[0][0]) == 12
