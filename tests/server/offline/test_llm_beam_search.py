from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from logits_processor_zoo.vllm import TriggerPhraseLogitsProcessor

from logitship import BeamSearchParams, CustomLogitProcessor, SamplingParams
from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.model.model_loader import LoadedModel
from logitship.server.offline.async_llm import AsyncLLM
from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput

PROMPTS = ["hello", "some other text"]


class Favours(CustomLogitProcessor):
    """Raises the logit of one token."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["token_id"]] += 6.0
        return logits


def test_beam_search_output(llm: LLM, loaded_model: LoadedModel) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=5))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        prompt_ids = loaded_model.tokenizer.encode(prompt)
        assert len(output.sequences) == 3
        assert [one.score for one in output.sequences] == sorted((o.score for o in output.sequences), reverse=True)
        for one in output.sequences:
            assert one.tokens[: len(prompt_ids)] == prompt_ids
            generated = len(one.logprobs)
            assert one.score == pytest.approx(one.cum_logprob / generated)
            assert one.text == loaded_model.tokenizer.decode(one.tokens, skip_special_tokens=True)
            assert one.text.startswith(prompt)
            shown = [logprob.logprob for table in one.logprobs for logprob in table.values()]
            assert sum(shown) == pytest.approx(one.cum_logprob)


@pytest.mark.parametrize("included", [True, False])
def test_include_stop_str_in_output(llm: LLM, included: bool) -> None:
    params = BeamSearchParams(
        beam_width=2,
        max_tokens=9,
        length_penalty=0.0,
        include_stop_str_in_output=included,
        custom_logit_processor=Favours,
        custom_params={"token_id": 1},
    )
    (output,) = llm.beam_search("hello", params)
    first = output.sequences[0]
    assert (first.finish_reason, first.stop_reason) == ("stop", None)
    assert (first.tokens[-1] == 1) == included
    assert len(first.tokens) == 5 + len(first.logprobs) - (not included)
    assert [receipt.steps for receipt in first.receipts] == [len(first.logprobs)]


def test_ignore_eos_and_structured_outputs(llm: LLM) -> None:
    (output,) = llm.beam_search("hello", BeamSearchParams(2, 4, ignore_eos=True, early_stopping="never"))
    assert [one.finish_reason for one in output.sequences] == ["length", "length"]
    (output,) = llm.beam_search("hello", BeamSearchParams(4, 9, structured_outputs={"choice": ["ab", "ac", "d"]}))
    assert sorted(one.text.removeprefix("hello") for one in output.sequences) == ["ab", "ac", "d"]


def only(llm: LLM, **params: Any) -> RequestOutput:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=5, **params), use_tqdm=False)
    return output


def test_beam_search_with_sampling_params(llm: LLM) -> None:
    (searched,) = llm.beam_search("hello", BeamSearchParams(3, 5, length_penalty=0.5))
    output = only(llm, num_beams=3, num_return_sequences=2, length_penalty=0.5)
    assert [one.token_ids for one in output.outputs] == [one.tokens[5:] for one in searched.sequences[:2]]
    assert [one.cumulative_logprob for one in output.outputs] == [one.cum_logprob for one in searched.sequences[:2]]
    assert [one.beam_score for one in output.outputs] == [one.score for one in searched.sequences[:2]]
    assert [one.logprobs for one in output.outputs] == [None, None]
    assert output.outputs[0].beam_score is not None
    assert only(llm, temperature=0).outputs[0].beam_score is None
    as_sglang = {"max_new_tokens": 5, "num_beams": 3, "n": 2, "length_penalty": 0.5}
    (again,) = llm.generate("hello", as_sglang, use_tqdm=False)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in output.outputs]


def test_single_beam_is_greedy(llm: LLM) -> None:
    (greedy,) = only(llm, temperature=0).outputs
    (beam,) = only(llm, use_beam_search=True).outputs
    assert beam.token_ids == greedy.token_ids


async def test_async_yields_only_final_output(make_async_llm: Callable[..., AsyncLLM]) -> None:
    generated = make_async_llm().generate("hello", SamplingParams(max_tokens=5, num_beams=3, n=2))
    (output,) = [output async for output in generated]
    assert output.finished
    assert len(output.outputs) == 2


def test_beam_search_waits_for_queue(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=3, max_queued_requests=2)
    outputs = llm.beam_search(["a", "b", "c", "d"], BeamSearchParams(3, 4))
    assert [len(output.sequences) for output in outputs] == [3] * 4


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "temperature"),
        ({"num_beams": 2, "top_k": 3}, "top_k"),
        ({"num_beams": 9}, "num_beams"),
    ],
)
def test_refused_params(llm: LLM, params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        only(llm, **params)


@pytest.mark.parametrize("width", [9, 100_000])
def test_beam_width_beyond_the_engine(llm: LLM, width: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^beam_width: asks for") as caught:
        llm.beam_search("hello", BeamSearchParams(beam_width=width, max_tokens=2))
    assert caught.value.param == "beam_width"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SamplingParams(num_beams=2, n=3), "n"),
        (lambda: SamplingParams(num_return_sequences=2, n=3), "num_return_sequences"),
        (lambda: SamplingParams(num_beams=2, n=1, best_of=2), "best_of"),
        (lambda: SamplingParams(length_penalty=2.0), "length_penalty"),
        (lambda: BeamSearchParams(0, 5), "beam_width"),
        (lambda: BeamSearchParams(2, 5, temperature=0.5), "temperature"),
        (lambda: BeamSearchParams(2, 5, length_penalty=99), "length_penalty"),
        (lambda: BeamSearchParams(2, -1), "max_tokens"),
    ],
)
def test_invalid_beam_search_params(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(InvalidSamplingParams) as refused:
        make()
    assert refused.value.field == field


def test_same_beams_as_hugging_face(llm: LLM, loaded_model: LoadedModel) -> None:
    model: Any = loaded_model.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    prompt = loaded_model.tokenizer.encode("hello")
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        max_new_tokens=7,
        pad_token_id=0,
    )
    model.set_attn_implementation(before)
    (output,) = llm.beam_search("hello", BeamSearchParams(4, 7, include_stop_str_in_output=True))
    assert [one.tokens for one in output.sequences] == [row.tolist() for row in expected]


def test_zoo_phrase_is_written_once_on_every_beam(llm: LLM, loaded_model: LoadedModel) -> None:
    """The `clone()` of logits-processor-zoo's classes makes an object that has not counted the phrase."""
    tokenizer = loaded_model.tokenizer
    trigger = TriggerPhraseLogitsProcessor(tokenizer, "(phrase)", trigger_token_phrase="!", trigger_after=True)
    params = SamplingParams(
        max_tokens=14, num_beams=4, n=4, logit_bias={tokenizer.encode("!")[-1]: 6.0}, logits_processors=[trigger]
    )
    (output,) = llm.generate("hello", params, use_tqdm=False)
    texts = [one.text for one in output.outputs]
    assert len(set(texts)) == 4
    assert all("!(phrase)" in text and text.count("!(") == 1 for text in texts)
