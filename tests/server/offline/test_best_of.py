from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from logitship.server.offline.async_llm import AsyncLLM
from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput
from logitship.server.offline.sampling_params import SamplingParams

PARAMS: dict[str, Any] = {"seed": 4, "max_tokens": 6, "ignore_eos": True}


def only(llm: LLM, **params: Any) -> RequestOutput:
    (output,) = llm.generate("hello", SamplingParams(**PARAMS | params), use_tqdm=False)
    return output


def test_best_of_returns_best_first(llm: LLM) -> None:
    every = only(llm, n=6, logprobs=1).outputs
    ranked = sorted(every, key=lambda one: -(one.cumulative_logprob or 0.0) / len(one.token_ids))
    assert ranked[0].index != 0, "this seed's first continuation must not be the best"
    best = only(llm, n=2, best_of=6)
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best.outputs] == [0, 1]
    assert [(one.cumulative_logprob, one.logprobs) for one in best.outputs] == [(None, None)] * 2
    shown = only(llm, n=2, best_of=6, logprobs=1).outputs
    assert [one.logprobs for one in shown] == [one.logprobs for one in ranked[:2]]


def test_async_yields_only_final_output(make_async_llm: Callable[..., AsyncLLM], llm: LLM) -> None:
    async def outputs(**params: Any) -> list[RequestOutput]:
        generated = make_async_llm().generate("hello", SamplingParams(**PARAMS | params))
        return [output async for output in generated]

    (output,) = asyncio.run(outputs(best_of=3))
    assert output.finished
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in only(llm, best_of=3).outputs]
    assert len(asyncio.run(outputs(n=2, best_of=2))) > 1


def test_best_of_waits_for_queue(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=2, max_queued_requests=3)
    outputs = llm.generate(["a", "b", "c"], SamplingParams(**PARAMS, best_of=4), use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [1, 1, 1]
    with pytest.raises(InvalidRequest, match="best_of: asks for 6 continuations, this engine takes at most 5"):
        llm.generate("a", SamplingParams(**PARAMS, best_of=6))


@pytest.mark.parametrize("value", [1, 0, -1, 2.0, True, "3"])
def test_invalid_best_of(value: Any) -> None:
    with pytest.raises(ValueError, match="best_of: must be an integer, not smaller than n, which is 2"):
        SamplingParams(n=2, best_of=value)


def test_best_of_is_not_an_sglang_name(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="best_of: unknown field"):
        llm.generate("a", {"best_of": 2})
