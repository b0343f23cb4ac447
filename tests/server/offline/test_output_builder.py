from __future__ import annotations

from typing import Any

import pytest

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.offline.llm import LLM
from logitship.server.offline.sampling_params import SamplingParams
from tests.helpers.offline import GREEDY, Force, quiet


def test_logprobs_format(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = quiet(llm, [10, 11, 12], params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(table)) for table in completion.logprobs] == completion.token_ids
    chosen = 0.0
    for table, token_id in zip(completion.logprobs, completion.token_ids, strict=True):
        chosen += table[token_id].logprob
        assert len(table) == 2  # greedy: the token is the first of the two most likely
        assert table[token_id].rank == 1
        assert [entry.rank for entry in table.values()] == [1, 2]
        assert table[token_id].decoded_token == llm.get_tokenizer().decode([token_id])
    assert completion.cumulative_logprob == pytest.approx(chosen)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(table)) for table in output.prompt_logprobs[1:] if table] == [11, 12]


def test_no_logprobs_by_default(llm: LLM) -> None:
    (output,) = quiet(llm, "hello", GREEDY)
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_stop_reasons(llm: LLM) -> None:
    def ended_by(token_id: int, **params: Any) -> tuple[str | None, int | str | None]:
        forced = SamplingParams(custom_logit_processor=Force, custom_params={"token_id": token_id}, **params)
        completion = quiet(llm, "hello", forced)[0].outputs[0]
        return completion.finish_reason, completion.stop_reason

    assert ended_by(1) == ("stop", None)  # the model's own EOS token
    assert ended_by(1, stop_token_ids=[1]) == ("stop", 1)
    assert ended_by(50, stop_token_ids=[50]) == ("stop", 50)
    text = llm.get_tokenizer().decode([70])
    assert ended_by(70, stop=text * 2) == ("stop", text * 2)
    assert ended_by(50, max_tokens=2) == ("length", None)


def test_sampling_records(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, seed=3, ignore_eos=True, top_k=4, return_sampling_mask=True)
    completion = quiet(llm, "hello", params)[0].outputs[0]
    record = completion.sampling_record
    assert record is not None
    assert record.token_ids.tolist() == completion.token_ids
    assert record.could_be_sampled().sum(axis=1).tolist() == [4] * 5
    assert quiet(llm, "hello", GREEDY)[0].outputs[0].sampling_record is None
    with pytest.raises(InvalidSamplingParams, match="sampling_mask_format: is not supported"):
        SamplingParams(return_sampling_mask=True, sampling_mask_format="lists")


def test_traces(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=3, seed=3, ignore_eos=True, trace=4, custom_logit_processor=Force, custom_params={"token_id": 9}
    )
    completion = quiet(llm, "hello", params)[0].outputs[0]
    assert completion.trace is not None
    assert [trace.token.token_id for trace in completion.trace] == completion.token_ids == [9, 9, 9]
    for trace in completion.trace:
        assert trace.token.text == llm.get_tokenizer().decode([9])
        assert [stage.name or stage.stage for stage in trace.stages] == ["model", "request", "Force", "sampling"]
        assert [stage.num_allowed for stage in trace.stages][2:] == [1, 1]
    assert quiet(llm, "hello", GREEDY)[0].outputs[0].trace is None
