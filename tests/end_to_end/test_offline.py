"""`LLM` and `AsyncLLM` on the real model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from logitship import LLM, AsyncLLM, BeamSearchParams, Client, CustomLogitProcessor, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 ="]
"""In their greedy answers, the log-probabilities of the two most likely tokens differ by at least 0.03. Rounding
changes them by about 1e-4, so it does not affect the answers."""


class Ban(CustomLogitProcessor):
    """Forbids `token_ids`."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list):
            logits[row, params["token_ids"]] = -torch.inf
        return logits


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(seed=0, max_model_len=1024) as llm:
        yield llm


def test_same_outputs_as_server(llm: LLM, real_server: str) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    with Client(real_server) as client:
        answers = client.generate(PROMPTS, temperature=0, max_new_tokens=16)
    assert [output.outputs[0].text for output in outputs] == [answer.text for answer in answers]
    assert "Paris" in outputs[0].outputs[0].text


def test_class_and_callable(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (comma,), (full_stop,) = tokenizer.encode(","), tokenizer.encode(".")

    def no_full_stop(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[full_stop] = -torch.inf
        return logits

    both = [{"processor": Ban, "params": {"token_ids": [comma]}}, no_full_stop]
    params = [
        SamplingParams(temperature=0, max_tokens=32),
        SamplingParams(temperature=0, max_tokens=32, logits_processors=both),
    ]
    plain, edited = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
    assert {comma, full_stop} & set(plain.outputs[0].token_ids)
    assert not {comma, full_stop} & set(edited.outputs[0].token_ids)
    assert [receipt.name.rpartition(".")[2] for receipt in edited.receipts] == ["Ban", "no_full_stop"]


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        {"temperature": 0, "max_new_tokens": 16},
        use_tqdm=False,
    )
    assert "Paris" in output.outputs[0].text
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")


def test_async_llm(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0), use_tqdm=False)

    async def main() -> list[str]:
        async with AsyncLLM(max_model_len=1024) as async_llm:
            return [
                output.outputs[0].text async for output in async_llm.generate(PROMPTS[0], SamplingParams(temperature=0))
            ]

    texts = asyncio.run(main())
    assert texts[-1] == expected.outputs[0].text
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_same_beams_as_hugging_face(llm: LLM) -> None:
    """Scores differ by more than rounding, and `LLM.generate` and `LLM.beam_search` agree."""
    model: Any = llm._engine._engine._runner.model
    tokenizer = llm.get_tokenizer()
    before, expected = model.config._attn_implementation, []
    model.set_attn_implementation("sdpa")
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            max_new_tokens=10,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [row[ids.shape[1] :].tolist() for row in output.sequences]
        expected.append((rows, output.sequences_scores.tolist()))
    model.set_attn_implementation(before)
    outputs = llm.generate(PROMPTS, SamplingParams(num_beams=4, n=4, max_tokens=10), use_tqdm=False)
    for found, (rows, scores) in zip(outputs, expected, strict=True):
        assert [one.beam_score for one in found.outputs] == pytest.approx(scores, abs=1e-3)
        assert [one.token_ids for one in found.outputs] == [
            row[: len(one.token_ids)] for one, row in zip(found.outputs, rows, strict=True)
        ]
    searched = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=10))
    for found, each in zip(searched, outputs, strict=True):
        # Not bit-identical: the prompts of the second search come from the prefix cache.
        assert [one.score for one in found.sequences] == pytest.approx(
            [one.beam_score for one in each.outputs], abs=1e-3
        )
