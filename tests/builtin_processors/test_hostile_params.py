"""Parameters that could harm other requests are refused at admission, or harmless."""

from __future__ import annotations

import asyncio
import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from logitship.builtin_processors import GrammarProcessor, ThinkingBudgetLogitProcessor, TreeLogitsProcessor
from logitship.builtin_processors import grammar as grammar_module
from logitship.builtin_processors.no_repeat_ngram import NGramIndex
from logitship.builtin_processors.parts.text_tokens import MAX_TEXT_TOKENS
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.processors.executor import PREPARED_KEY
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.requests.messages import GenerationChunk, GenerationRequest, ProcessorRequest
from logitship.server.tokenizer import Tokenizer
from tests.helpers.watermarks import installed_processors

Params = dict[str, Any]

VOCAB_SIZE, EOS = 260, 1
LONG_TEXT = "ab" * MAX_TEXT_TOKENS
LONG_MARKER = [70, 71] * MAX_TEXT_TOKENS


@pytest.fixture
def model(tokenizer: Tokenizer) -> ModelView:
    return ModelView(VOCAB_SIZE, frozenset({EOS}), tokenizer.hf_tokenizer)


TOO_MUCH: list[tuple[str, Params, str]] = [
    ("force_last_phrase", {"phrase": LONG_TEXT}, "phrase: expected at most 1024 tokens, got 2048"),
    ("force_last_phrase", {"phrase": "a" * (1 << 20)}, "phrase: expected at most 16384 characters, got 1048576"),
    (
        "trigger_phrase",
        {"phrase": "a", "trigger_token_phrase": LONG_TEXT},
        "trigger_token_phrase: expected a string of one",
    ),
    ("prevent_hallucination", {"phrase": LONG_TEXT}, "phrase: expected at most 1024 tokens"),
    ("thinking_budget", {"thinking_budget": 1, "start": LONG_MARKER}, "start: expected at most 1024 tokens, got 2048"),
    ("thinking_budget", {"thinking_budget": 1, "end": LONG_TEXT}, "end: expected at most 1024 tokens, got 2048"),
    (
        "think_mode",
        {"max_thinking_tokens": 1, "end_think_tag": LONG_TEXT},
        "end_think_tag: expected at most 1024 tokens",
    ),
    (
        "strict_think_mode",
        {"max_thinking_tokens": 1, "begin_think_token_ids": LONG_MARKER},
        "begin_think_token_ids: expected at most 1024 tokens",
    ),
    ("grammar", {"regex": "a", "after": LONG_TEXT}, "after: expected at most 1024 tokens"),
    ("grammar", {"regex": "a", "after": LONG_MARKER}, "after: expected at most 1024 tokens"),
    (
        "grammar",
        {"json_object": True, "whitespace_pattern": " " * (1 << 20)},
        "the JSON cannot be used: it has 1048580 char",
    ),
    ("multiple_choice", {"choices": ["a"] * 1025}, "choices: expected a list of 1 to 1024 texts of one token each"),
    (
        "multiple_choice",
        {"delimiter": "." * (1 << 20)},
        "delimiter: expected a string of one token, but .* has 1048576 char",
    ),
    ("gen_length", {"boost_factor": 1e10}, "boost_factor: expected a number from -1e9 to 1e9"),
    (
        "tree",
        {"tree": {"prefix_dict": {"225": [5]}, "sep": "_" * 17}},
        "tree: sep: expected at most 16 characters, got 17",
    ),
    (
        "tree",
        {"tree": {"prefix_dict": {"5": [5]}}},
        "tree: prefix_dict: expected a path '225', where every sequence starts",
    ),
]


@pytest.mark.parametrize(("name", "params", "message"), TOO_MUCH)
def test_oversized_parameters_are_refused(name: str, params: Params, message: str, model: ModelView) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        installed_processors().make(name).prepare(params, model)


TEXTS: list[tuple[str, Params, str]] = [
    ("force_last_phrase", {}, "phrase"),
    ("gen_length", {"boost_factor": 1.0}, "boost_token_str"),
    ("grammar", {"regex": "a"}, "after"),
    ("multiple_choice", {}, "delimiter"),
    ("think_mode", {"max_thinking_tokens": 1}, "end_think_tag"),
    ("thinking_budget", {"thinking_budget": 1}, "end"),
]


@pytest.mark.parametrize(("name", "params", "field"), TEXTS)
def test_invalid_text_is_refused(name: str, params: Params, field: str, model: ModelView) -> None:
    """Tokenizers would raise a TypeError."""
    with pytest.raises(ValueError, match=f"^{field}: .* contains an unpaired surrogate"):
        installed_processors().make(name).prepare({**params, field: "\ud800"}, model)


@pytest.mark.parametrize(("name", "params", "field"), TEXTS)
def test_token_outside_the_vocabulary_is_refused(name: str, params: Params, field: str, model: ModelView) -> None:
    """A tokenizer may have more tokens than the model has logits: forcing one would fail a step for all its rows."""
    smaller = ModelView(50, model.eos_token_ids, model.tokenizer)
    with pytest.raises(ValueError, match=f"^{field}: .* needs token [0-9]+, which the model cannot sample"):
        installed_processors().make(name).prepare({**params, field: "z"}, smaller)


def test_long_ngrams_take_no_more_memory() -> None:
    def peak(ngram_size: int) -> int:
        index = NGramIndex(ngram_size, 10**18)
        tracemalloc.start()
        index.follow(list(range(4000)), [])
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(2000) <= peak(2)


def test_tree_candidates_are_sliced_without_copy() -> None:
    tree = TokenTree({"225": range(100_000)})
    allowed = tree.allowed(tree.start, 50_000)
    assert allowed.tolist() == list(range(50_000))
    assert np.shares_memory(allowed, tree.candidates(tree.start))


def test_tree_in_a_request_needs_a_start() -> None:
    """Unlike in a file, see `test_token_tree_format.py`. In a request, the mistake would go unnoticed."""
    with pytest.raises(ValueError, match="where every sequence starts; it is the start_token_id"):
        TreeLogitsProcessor().prepare({"tree": {"prefix_dict": {}}}, ModelView(12, frozenset({2}), None))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_slow_masks_end_the_row(
    num_rows: int,
    model: ModelView,
    make_row: Callable[..., Params],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If several are computed in parallel, the slow one is identified in the next step."""
    processor = GrammarProcessor()
    rows = [make_row({"regex": "a*"}, [5], [], eos_token_ids={EOS}) for _ in range(num_rows)]
    for row in rows:
        row[PREPARED_KEY] = processor.prepare({"regex": "a*"}, model)
    (token,) = model.tokenizer.encode("a", add_special_tokens=False)

    def num_allowed() -> list[int]:
        return [int(each.isfinite().sum()) for each in processor(torch.zeros(num_rows, VOCAB_SIZE), rows)]

    monkeypatch.setattr(grammar_module, "_MAX_SECONDS", -1.0)
    # A mask may be slow because the machine is: two are no failure. Every other step computes several in parallel.
    for _ in range(2 if num_rows == 1 else 5):
        assert num_allowed() == [2] * num_rows  # "a" and the end
        for row in rows:
            row["__req__"].output_ids.append(token)
    with caplog.at_level(logging.WARNING):
        assert num_allowed() == [0] * num_rows
    assert "a grammar became too complex to continue: its masks take too long" in caplog.text
    assert num_allowed() == [0] * num_rows
    assert processor.stats() == (0, 0, num_rows)


def test_fast_rows_continue_after_a_slow_step(
    model: ModelView, make_row: Callable[..., Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = GrammarProcessor()
    rows = [make_row({"regex": "a*"}, [5], [], eos_token_ids={EOS}) for _ in range(3)]
    for row in rows:
        row[PREPARED_KEY] = processor.prepare({"regex": "a*"}, model)
    (token,) = model.tokenizer.encode("a", add_special_tokens=False)
    for limit in (-1.0, 60.0, 60.0):
        monkeypatch.setattr(grammar_module, "_MAX_SECONDS", limit)
        logits = processor(torch.zeros(3, VOCAB_SIZE), rows)
        assert logits.isfinite().sum(1).tolist() == [2, 2, 2]
        for row in rows:
            row["__req__"].output_ids.append(token)


REGISTRY = installed_processors()
CLASSES: dict[str, Any] = {name: REGISTRY.get(name) for name in REGISTRY}
HUGE = 10**18
EXTREME: list[tuple[str, Params]] = [
    ("cite_from_prompt", {"boost_factor": 1e9, "conditional_boost_factor": -1e9}),
    ("disallowed_tokens", {"token_ids": []}),
    ("disallowed_tokens", {"token_ids": list(range(VOCAB_SIZE - 1)) * 3}),
    ("force_last_phrase", {"phrase": "ab" * (MAX_TEXT_TOKENS // 2)}),
    ("gen_length", {"boost_factor": -1e9, "p": 20, "complete_sentences": True}),
    ("gen_length", {"boost_factor": 1e9, "p": 20, "boost_token_str": "b"}),
    ("grammar", {"ebnf": 'root ::= root root | "a"'}),
    ("grammar", {"regex": "(a|b|[^ab])*", "after": [70] * MAX_TEXT_TOKENS}),
    ("max_time", {"max_time": 0.0, "boost_token_str": "b"}),
    ("max_time", {"max_time": 1e308}),
    ("multi_sequence", {"eos_token_ids": list(range(VOCAB_SIZE)) * 2}),
    ("multiple_choice", {"choices": ["a", "b"] * 512, "boost_first_words": -1e9}),
    ("no_repeat_ngram", {"ngram_size": HUGE, "window_size": HUGE}),
    ("no_repeat_ngram", {"ngram_size": 1, "window_size": HUGE, "whitelist_token_ids": list(range(9)) * 99}),
    ("prevent_hallucination", {"minp": 1.0, "tolerate": 0}),
    ("strict_think_mode", {"max_thinking_tokens": 1, "end_think_token_ids": [70] * MAX_TEXT_TOKENS}),
    ("think_mode", {"max_thinking_tokens": HUGE}),
    ("thinking_budget", {"thinking_budget": HUGE}),
    ("thinking_budget", {"thinking_budget": 0, "start": "h", "end": [70] * MAX_TEXT_TOKENS, "newline": "zz"}),
    ("tree", {"tree": {"prefix_dict": {"225": list(range(100_000)), "2255": []}, "sep": ""}}),
    ("tree", {"tree": {"prefix_dict": {"225": []}, "end_token_id": -1}}),
    ("watermark_kgw", {"greenlist_ratio": 1e-300, "bias": 100.0, "context_width": 16}),
    ("watermark_kgw", {"greenlist_ratio": 1 - 2**-53, "bias": 100.0, "seeding_scheme": "lefthash"}),
    ("watermark_synthid", {"ngram_len": 16, "depth": 64, "context_history_size": HUGE, "candidates": 4096}),
    ("watermark_synthid", {"ngram_len": 2, "depth": 1, "context_history_size": 0, "candidates": 1}),
    ("trigger_phrase", {"phrase": "a", "trigger_time": 1e-300, "trigger_count": 10**9}),
    ("trigger_phrase", {"phrase": "a", "trigger_token_phrase": "a", "trigger_count": 0, "trigger_after": True}),
]
EXTREME += [
    (name, dict(processor.example))
    for name, processor in CLASSES.items()
    if name not in dict(EXTREME) and not issubclass(processor, ThinkingBudgetLogitProcessor)
]


def use(name: str, params: Params) -> ProcessorRequest:
    return ProcessorRequest(InstalledProcessor(name), params, own=True)


def request(rid: str, *processors: ProcessorRequest, n: int = 1, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        rid=rid,
        prompt_token_ids=[70, 71, 5, 70, 71, 72],
        sampling_params=SamplingParams(**({"max_tokens": 12, "ignore_eos": True, "seed": 7} | params)),
        processors=processors,
        n=n,
    )


async def outcome(engine: AsyncEngine, wanted: GenerationRequest) -> tuple[list[int], list[GenerationChunk]]:
    """Return the tokens of the first continuation, and the last chunk of each."""
    tokens: list[int] = []
    ends = []
    async for chunk in await engine.submit(wanted):
        tokens += chunk.token_ids if chunk.index == 0 else []
        if chunk.finish_reason is not None:
            ends.append(chunk)
    return tokens, ends


def run_all(engine: AsyncEngine, *wanted: GenerationRequest) -> list[tuple[list[int], list[GenerationChunk]]]:
    async def run() -> list[tuple[list[int], list[GenerationChunk]]]:
        async with asyncio.timeout(120):
            return list(await asyncio.gather(*(outcome(engine, each) for each in wanted)))

    return asyncio.run(run())


def assert_no_processor_failed(ends: list[GenerationChunk], n: int = 1) -> None:
    """Check that `n` continuations reached their lengths, or ended because their processors left no token."""
    assert len(ends) == n
    for chunk in ends:
        reason = chunk.finish_reason
        assert reason is not None
        assert reason.kind == "length" or (reason.error and reason.error.type == "NoTokenLeftError"), reason


def test_extremes_do_not_affect_other_requests(
    make_engine: Callable[..., AsyncEngine], watermark_key_file: str
) -> None:
    """All extremes in the same steps, and a request without processors."""
    engine = make_engine(max_num_seqs=32, watermark_key_file=watermark_key_file)
    alone = [tokens for tokens, _ in run_all(engine, request("plain"))]
    wanted = [request(f"{place}", use(*extreme), n=2) for place, extreme in enumerate(EXTREME)]
    outcomes = run_all(engine, *wanted, request("other"))
    for _, ends in outcomes[:-1]:
        assert_no_processor_failed(ends, n=2)
    assert_no_processor_failed(outcomes[-1][1])
    assert outcomes[-1][0] == alone[0]
    assert len(outcomes[-1][0]) == 12


@pytest.mark.slow
def test_all_extremes_in_one_request(make_engine: Callable[..., AsyncEngine], watermark_key_file: str) -> None:
    engine = make_engine(watermark_key_file=watermark_key_file)
    masks = [use(*extreme) for extreme in EXTREME if CLASSES[extreme[0]].is_mask]
    others = [use(*extreme) for extreme in EXTREME if not CLASSES[extreme[0]].is_mask]
    (without, ends), (_, ends_of_all), (other, _) = run_all(
        engine,
        request("without masks", *others * (64 // len(others))),
        request("all", *masks, *others, *masks),
        request("other"),
    )
    assert_no_processor_failed([*ends, *ends_of_all], n=2)
    assert (len(without), len(other)) == (12, 12)


@pytest.mark.slow
def test_maximum_uses_of_one_processor(make_engine: Callable[..., AsyncEngine]) -> None:
    engine = make_engine()
    for name, params in (
        ("no_repeat_ngram", {"ngram_size": 2, "window_size": 90}),
        ("multiple_choice", {"choices": ["a", "b"]}),
        ("trigger_phrase", {"phrase": "ab", "trigger_token_phrase": "a"}),
        ("thinking_budget", {"thinking_budget": 1, "start": "a", "end": "b"}),
    ):
        ((tokens, ends),) = run_all(engine, request(name, *[use(name, params)] * 64))
        assert_no_processor_failed(ends)
        assert len(tokens) == 12, name


def test_shared_parameters(make_engine: Callable[..., AsyncEngine]) -> None:
    """Each reads its own keys of the request's `custom_params`, and none modifies them."""
    shared = {"phrase": "ab", "trigger_token_phrase": "b", "token_ids": [70], "choices": ["a", "b", "c"]}
    names = ("trigger_phrase", "force_last_phrase", "disallowed_tokens", "multiple_choice", "trigger_phrase")
    before = dict(shared)
    uses = [ProcessorRequest(InstalledProcessor(name), shared) for name in names]
    ((tokens, ends),) = run_all(make_engine(), request("shared", *uses))
    assert_no_processor_failed(ends)
    assert len(tokens) == 12
    assert 70 not in tokens
    assert shared == before
