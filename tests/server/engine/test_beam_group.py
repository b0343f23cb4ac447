"""Beam search in the engine, against plain implementations without a cache, a batch or forks."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from logitship.builtin_processors import TreeLogitsProcessor
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.processors.local_executor import LocalRow
from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import (
    BeamSearch,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
)
from tests.helpers.coroutines import run, until
from tests.helpers.engine_requests import BuildEngine, generate_all, installed
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import shipped, shipped_by_row

Edit = Callable[[list[int], torch.Tensor], torch.Tensor]
"""(output, logits [vocab]) to edited logits [vocab]."""

ENDS = frozenset({1, *range(100, 130)})
"""Enough tokens that sequences of the tiny model end now and then."""
PROMPTS = [[5, 6, 7, 8], [9], [40 + 3 * k for k in range(25)]]

CHECKS_HISTORY = shipped_by_row(
    "ChecksHistory",
    """
    # Boost tokens that depend on the history alone, and assert one call per token of it.
    state = req.state
    calls = state.setdefault("calls", params["calls"])
    assert calls is params["calls"], "params and state refer to one list"
    calls.append(len(req.output_ids))
    assert calls == list(range(len(req.output_ids) + 1)), (calls, req.output_ids)
    for token in req.output_ids[state.get("read", 0):]:
        state["hash"] = (31 * state.get("hash", 7) + token) % 251
    state["read"] = len(req.output_ids)
    row[state.get("hash", 7) % 6 :: 6] += 3.0
    """,
)
KEEPS_UNCOPYABLE = shipped_by_row(
    "KeepsUncopyable", 'if params.get("keeps"): req.state["lock"] = (each for each in ())'
)
FAILS_LATER = shipped_by_row("FailsLater", 'if len(req.output_ids) == 3: raise ValueError("no such luck")')


def request(rid: str = "r", prompt: Sequence[int] = (5, 6, 7, 8), **fields: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "stop_token_ids": ENDS, "ignore_eos": False}
    return any_request(rid, prompt, **(defaults | fields))


async def last_chunks(engine: AsyncEngine, *wanted: GenerationRequest) -> list[list[GenerationChunk]]:
    """Return the last chunk of each output of each request, without absent ones."""
    answers = await asyncio.gather(*(generate_all(engine, each) for each in wanted))
    for each, outputs in zip(wanted, answers, strict=True):
        assert each.beam_search is None or all(output.last.token_ids == output.token_ids for output in outputs)
    absent = FinishReason("absent")
    return [[output.last for output in outputs if output.finish_reason != absent] for outputs in answers]


async def search_one(engine: AsyncEngine, wanted: GenerationRequest) -> list[GenerationChunk]:
    (chunks,) = await last_chunks(engine, wanted)
    return chunks


def assert_free(engine: AsyncEngine) -> None:
    """Assert that no slot or row is in use, and no request is active."""
    internal = engine._engine
    assert internal._runner.cache.num_free == engine.config.max_num_seqs
    assert len(internal._batch) == 0
    assert (internal.num_running, internal.num_waiting) == (0, 0)
    assert not engine._active


def no_edit(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


@contextmanager
def plain_attention(loaded: LoadedModel) -> Iterator[None]:
    """Use transformers' own attention, and restore the engine's afterwards."""
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    yield
    loaded.model.set_attn_implementation(before)


def generate_of(loaded: LoadedModel) -> Callable[..., Any]:
    model: Any = loaded.model
    return model.generate  # type: ignore[no-any-return]


def reference(
    loaded: LoadedModel,
    prompt: Sequence[int],
    search: BeamSearch,
    max_tokens: int = 6,
    edit: Edit = no_edit,
    ends: frozenset[int] = ENDS,
) -> list[tuple[list[int], float]]:
    """Return finished outputs and scores, the best first, by the rules of `generate(num_beams=…)`."""
    with plain_attention(loaded):
        return _reference(loaded, prompt, search, max_tokens, edit, ends)


def _reference(
    loaded: LoadedModel, prompt: Sequence[int], search: BeamSearch, max_tokens: int, edit: Edit, ends: frozenset[int]
) -> list[tuple[list[int], float]]:
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        candidates = []
        for output, total in beams:
            with torch.no_grad():
                logits = loaded.model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
            logprobs = edit(output, logits).log_softmax(0).tolist()
            candidates += [(total + logprob, [*output, token]) for token, logprob in enumerate(logprobs)]
        candidates = [each for each in candidates if each[0] > -math.inf]
        candidates.sort(key=lambda each: -each[0])
        candidates = candidates[: (1 + len(ends)) * search.width]
        beams = []
        for rank, (total, output) in enumerate(candidates):
            if output[-1] not in ends and length < max_tokens:
                beams.append((output, total))
            elif rank < search.width:
                finished.append((output, total / length**search.length_penalty))
        beams = beams[: search.width]
        finished = sorted(finished, key=lambda each: -each[1])[: search.width]
        if not beams:
            break
        if len(finished) == search.width:
            longest = max_tokens if search.early_stopping == "never" and search.length_penalty > 0 else length
            if search.early_stopping is True or beams[0][1] / longest**search.length_penalty <= finished[-1][1]:
                break
    return finished


def up_to_end_token(output: list[int]) -> list[int]:
    """Remove the padding after the EOS token."""
    end = next((place for place, token in enumerate(output) if token in ENDS), len(output))
    return output[: end + 1]


def found(chunks: Sequence[GenerationChunk]) -> list[tuple[list[int], Any]]:
    assert all(chunk.beam_score is not None for chunk in chunks)
    return [(chunk.token_ids, pytest.approx(chunk.beam_score, abs=1e-3)) for chunk in chunks]


@pytest.mark.slow
@pytest.mark.parametrize(
    "early_stopping", [True, *(pytest.param(each, marks=pytest.mark.thorough) for each in (False, "never"))]
)
def test_equal_to_hugging_face_generate(
    make_engine: BuildEngine, loaded_model: LoadedModel, early_stopping: bool
) -> None:
    cases = list(itertools.product(PROMPTS, (1, 2, 4), (-1.0, 0.0, 0.6, 1.0, 2.0)))
    expected = []
    for prompt, width, penalty in cases:
        with plain_attention(loaded_model):
            output = generate_of(loaded_model)(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=9,
                length_penalty=penalty,
                early_stopping=early_stopping,
                eos_token_id=sorted(ENDS),
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        rows = [up_to_end_token(row[len(prompt) :].tolist()) for row in output.sequences]
        scores = output.sequences_scores.tolist() if width > 1 else [None]
        expected.append(list(zip(rows, scores, strict=True)))
    engine = make_engine(max_num_seqs=8)
    requests = [
        request(str(i), prompt, beam_search=BeamSearch(width, penalty, early_stopping), n=width, max_tokens=9)
        for i, (prompt, width, penalty) in enumerate(cases)
    ]
    answers = run(last_chunks(engine, *requests))
    for case, answer, wanted in zip(cases, answers, expected, strict=True):
        assert [chunk.token_ids for chunk in answer] == [tokens for tokens, _ in wanted], case
        if case[1] > 1:
            assert [chunk.beam_score for chunk in answer] == pytest.approx([score for _, score in wanted], abs=1e-3)
    ended = [chunk.finish_reason.kind for answer in answers for chunk in answer]
    assert ended.count("stop") > 20
    assert ended.count("length") > 20
    assert_free(engine)


def test_equal_to_renormalized_generate_with_edits(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    forbidden = [49, 54, 97, 246, *range(200, 230)]
    with plain_attention(loaded_model):
        output = generate_of(loaded_model)(
            torch.tensor([PROMPTS[0]]),
            attention_mask=torch.ones(1, 4, dtype=torch.int64),
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            max_new_tokens=6,
            suppress_tokens=forbidden,
            renormalize_logits=True,
            eos_token_id=sorted(ENDS),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    processors = [installed("disallowed_tokens", token_ids=forbidden)]
    engine = make_engine()
    answer = run(search_one(engine, request(beam_search=BeamSearch(4), n=4, processors=processors)))
    assert [chunk.token_ids for chunk in answer] == [up_to_end_token(row[4:].tolist()) for row in output.sequences]
    assert [chunk.beam_score for chunk in answer] == pytest.approx(output.sequences_scores.tolist(), abs=1e-3)


def test_speculation_does_not_change_outputs(make_engine: BuildEngine) -> None:
    processors: list[Any] = [(CHECKS_HISTORY, {"calls": []})]
    wanted = [
        request("a", PROMPTS[0], beam_search=BeamSearch(3), n=3, processors=processors, max_tokens=20),
        request("b", [5, 6, 7] * 8, beam_search=BeamSearch(2), n=2, stop_token_ids=(), max_tokens=20),
        request("c", [5, 6, 7] * 8, processors=processors, stop_token_ids=(), max_tokens=30),
        request("d", [9, 9, 9, 9, 9, 9], stop_token_ids=(), max_tokens=30),
    ]

    async def all_of(engine: AsyncEngine) -> list[list[list[int]]]:
        answers = await asyncio.gather(*(generate_all(engine, one) for one in wanted))
        return [[output.token_ids for output in answer] for answer in answers]

    drafting = make_engine(max_num_seqs=7, speculative_algorithm="NGRAM")
    assert run(all_of(drafting)) == run(all_of(make_engine(max_num_seqs=7)))
    assert_free(drafting)


def test_sums_scores_and_counts(make_engine: BuildEngine) -> None:
    engine = make_engine()
    wanted = request(beam_search=BeamSearch(3, 0.5), n=2, logprobs=2, logprobs_mode="processed_logprobs")
    for chunk in run(search_one(engine, wanted)):
        length = len(chunk.token_ids)
        assert chunk.completion_tokens == length
        assert chunk.prompt_tokens == 4
        assert [position.token_id for position in chunk.logprobs] == chunk.token_ids
        assert sum(position.logprob or 0.0 for position in chunk.logprobs) == pytest.approx(chunk.cumulative_logprob)
        assert chunk.beam_score == pytest.approx((chunk.cumulative_logprob or 0.0) / length**0.5)
        for position in chunk.logprobs:
            assert len(position.top) == 2
            assert position.rank is not None
            if position.rank <= 2:
                assert position.top[position.rank - 1] == (position.token_id, position.logprob)


def replayed(string: SourceProcessor, params: Callable[[], dict[str, Any]]) -> Edit:
    """Return a processor's edit after an output, with one call per prefix of it, as when sampling."""
    processor = load_class(string)()

    def edit(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        view = RequestView(
            rid="r",
            prompt_token_ids=[],
            output_token_ids=[],
            sampling_params=SamplingParams(),
            model=ModelView(260, frozenset({1}), None),
        )
        values = {**params(), "__req__": view}
        for length in range(len(output) + 1):
            view.output_ids[:] = output[:length]
            (edited,) = processor(logits[None].clone(), [values])
        return torch.as_tensor(edited)

    return edit


@pytest.mark.parametrize("isolation", ["none", pytest.param("sandbox", marks=pytest.mark.thorough)])
def test_processor_state_follows_its_beam(make_engine: BuildEngine, loaded_model: LoadedModel, isolation: str) -> None:
    searches = [BeamSearch(2), BeamSearch(4, 0.6), BeamSearch(3, 1.0, True)]
    edit = replayed(CHECKS_HISTORY, lambda: {"calls": []})
    expected = [reference(loaded_model, prompt, search, edit=edit) for prompt in PROMPTS for search in searches]
    engine = make_engine(max_num_seqs=9, processor_isolation=isolation)
    history: list[Any] = [(CHECKS_HISTORY, {"calls": []})]
    requests = [
        request(f"{i} {j}", prompt, beam_search=search, n=search.width, processors=history)
        for i, prompt in enumerate(PROMPTS)
        for j, search in enumerate(searches)
    ]
    answers = run(last_chunks(engine, *requests))
    assert [found(answer) for answer in answers] == expected
    for chunk in itertools.chain.from_iterable(answers):
        # One call per token of its own history.
        assert [receipt.steps for receipt in chunk.receipts] == [len(chunk.token_ids)]
    assert_free(engine)


def test_every_beam_is_a_path_of_the_tree(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    prefixes = {
        "7": [3, 4, 50, 51],
        "7_3": [60, 61],
        "7_4": [62],
        "7_50": [63, 64, 65],
        "7_51": [],
        "7_3_60": [70, 71, 72],
        "7_3_61": [73],
        "7_50_64": [74, 75],
    }
    tree = {"start_token_id": 7, "end_token_id": 1, "prefix_dict": prefixes}
    processor = TreeLogitsProcessor()

    def edit(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        view = RequestView(
            rid="r",
            prompt_token_ids=[5],
            output_token_ids=output,
            sampling_params=SamplingParams(),
            model=ModelView(260, frozenset({1}), None),
        )
        return processor(logits[None].clone(), [{"tree": tree, "__req__": view}])[0]

    ends = frozenset({1})
    wanted: dict[str, Any] = {"stop_token_ids": (), "max_tokens": 8}
    processors = [installed("tree", tree=tree)]
    for width in (2, 3, 16):
        search = BeamSearch(width)
        engine = make_engine(max_num_seqs=16)
        answer = run(search_one(engine, request(beam_search=search, n=width, processors=processors, **wanted)))
        assert found(answer) == reference(loaded_model, [5, 6, 7, 8], search, 8, edit, ends)
        for chunk in answer:
            *path, end = chunk.token_ids
            assert end == 1
            for length in range(len(path)):
                prefix = "_".join(map(str, [7, *path[:length]]))
                assert path[length] in prefixes[prefix]
        # The tree has fewer than 16 paths: a token without an entry of its own is a dead end.
        assert len(answer) == min(width, len({tuple(chunk.token_ids) for chunk in answer}))
        assert_free(engine)


def test_beam_without_allowed_tokens_is_dropped(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    """Only 20, 21 and 22 are allowed, and nothing after 20."""

    def edit(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, -math.inf)
        kept = [] if output[-1:] == [20] else [20, 21, 22]
        masked[kept] = logits[kept]
        return masked

    allowed: dict[str, Any] = {
        "allowed_token_ids": [20, 21, 22],
        "bad_words_token_ids": [[20, each] for each in (20, 21, 22)],
    }
    engine = make_engine()
    search = BeamSearch(3)
    answer = run(search_one(engine, request(beam_search=search, n=3, **allowed)))
    assert found(answer) == reference(loaded_model, [5, 6, 7, 8], search, edit=edit, ends=ENDS)
    assert all(20 not in chunk.token_ids[:-1] for chunk in answer)
    wanted = request(beam_search=search, n=2, allowed_token_ids=[20], bad_words_token_ids=[[20, 20]], max_tokens=3)
    nothing = run(search_one(engine, wanted))
    assert [chunk.finish_reason.error.type for chunk in nothing] == ["NoTokenLeftError"] * 2
    assert_free(engine)


def test_outputs_do_not_depend_on_batch_composition(make_engine: BuildEngine) -> None:
    processors: list[Any] = [(CHECKS_HISTORY, {"calls": []})]
    wanted = [
        request("a", PROMPTS[0], beam_search=BeamSearch(3), n=3, processors=processors),
        request("b", PROMPTS[2], beam_search=BeamSearch(2, 2.0, "never"), n=2, max_tokens=11),
        *(request(f"plain {i}", PROMPTS[i], temperature=0.8, seed=i, processors=processors[: i % 2]) for i in range(3)),
        request("c", PROMPTS[1], beam_search=BeamSearch(4, 1, True), n=2, processors=processors, min_tokens=3),
    ]
    engine, alone = make_engine(max_num_seqs=9, chunked_prefill_size=8), make_engine(max_num_seqs=4)
    together = run(last_chunks(engine, *wanted))
    apart = [run(search_one(alone, one)) for one in wanted]
    assert [[chunk.text for chunk in answer] for answer in together] == [
        [chunk.text for chunk in answer] for answer in apart
    ]
    assert [[chunk.token_ids for chunk in answer] for answer in together] == [
        [chunk.token_ids for chunk in answer] for answer in apart
    ]
    assert_free(engine)


def test_searches_wait_for_all_their_slots(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=4)
    wanted = [request(str(i), beam_search=BeamSearch(width)) for i, width in enumerate([4, 1, 3, 3, 2, 4])]
    answers = run(last_chunks(engine, *wanted))
    assert [len(answer) for answer in answers] == [1] * 6
    assert_free(engine)


@pytest.mark.parametrize("isolation", ["none", pytest.param("sandbox", marks=pytest.mark.thorough)])
async def test_abort_frees_slots_and_rows(make_engine: BuildEngine, isolation: str) -> None:
    engine = make_engine(max_num_seqs=4, processor_isolation=isolation)
    processors: list[Any] = [(CHECKS_HISTORY, {"calls": []})]
    endless = request(
        "endless", beam_search=BeamSearch(4), n=2, processors=processors, max_tokens=400, stop_token_ids=()
    )
    running = asyncio.ensure_future(search_one(engine, endless))
    waiting = asyncio.ensure_future(search_one(engine, request("waiting", beam_search=BeamSearch(2), n=1)))
    await until(lambda: engine.stats().running >= 4)
    engine.abort("endless")
    aborted, following = await running, await waiting
    assert [(chunk.finish_reason, chunk.token_ids) for chunk in aborted] == [(FinishReason("abort"), [])] * 2
    assert next(chunk.finish_reason.kind for chunk in following) in ("stop", "length")
    assert_free(engine)


async def test_closing_the_stream_cancels_the_search(make_engine: BuildEngine) -> None:
    engine = make_engine()
    endless = request("endless", beam_search=BeamSearch(4), max_tokens=400, stop_token_ids=())
    stream = await engine.submit(endless)
    await until(lambda: engine.stats().running >= 4)
    await stream.aclose()
    await search_one(engine, request("next"))
    assert_free(engine)


@pytest.mark.parametrize("isolation", ["none", pytest.param("sandbox", marks=pytest.mark.thorough)])
def test_uncopyable_state_ends_its_request(make_engine: BuildEngine, isolation: str) -> None:
    engine = make_engine(processor_isolation=isolation, max_num_seqs=6)
    wanted = [
        request("bad", beam_search=BeamSearch(2), n=2, processors=[(KEEPS_UNCOPYABLE, {"keeps": True})]),
        request("good", beam_search=BeamSearch(2), processors=[(KEEPS_UNCOPYABLE, {})]),
        request("plain", processors=[(KEEPS_UNCOPYABLE, {"keeps": True})]),
    ]
    bad, good, plain = run(last_chunks(engine, *wanted))
    for chunk in bad:
        error = chunk.finish_reason.error
        assert (error.type, error.kind, error.name, error.status_code) == (
            "ProcessorFault",
            "uncopyable",
            "KeepsUncopyable",
            400,
        )
        assert "cannot be copied, which beam search requires: TypeError" in error.message
    assert {chunk.finish_reason.kind for chunk in (*good, *plain)} <= {"stop", "length"}
    assert_free(engine)


def test_fault_ends_the_whole_search(make_engine: BuildEngine) -> None:
    engine = make_engine()
    wanted = request(beam_search=BeamSearch(3), n=2, processors=[(FAILS_LATER, {})], stop_token_ids=())
    answer = run(search_one(engine, wanted))
    assert [chunk.finish_reason.error.kind for chunk in answer] == ["exception", "exception"]
    assert_free(engine)


def test_failed_step_ends_searches(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    sampler = engine._engine._sampler
    sample, calls = sampler.sample, itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("the step fails")
        return sample(*args, **kwargs)

    monkeypatch.setattr(sampler, "sample", failing)
    wanted = [request("a", beam_search=BeamSearch(3), n=2, stop_token_ids=()), request("b", stop_token_ids=())]
    search, plain = run(last_chunks(engine, *wanted))
    next_one = run(search_one(engine, request()))
    assert [chunk.finish_reason.error.status_code for chunk in (*search, *plain)] == [500] * 3
    assert next_one[0].finish_reason.error is None
    assert_free(engine)


def test_stop_strings(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    """The stop string is the most likely first token, so it acts like an EOS token."""
    search, stop, token = BeamSearch(3, 0.0), "N", 49
    expected = reference(loaded_model, [5, 6, 7, 8], search, 8, ends=frozenset({1, token}))
    engine = make_engine()
    wanted: dict[str, Any] = {"beam_search": search, "n": 3, "stop": [stop], "stop_token_ids": (), "max_tokens": 8}
    trimmed = run(search_one(engine, request(**wanted)))
    kept = run(search_one(engine, request(**wanted, include_stop_str_in_output=True)))
    assert found(trimmed) == found(kept) == expected
    assert {chunk.finish_reason for chunk in kept} > {FinishReason("stop", stop)}
    for chunk, without in zip(kept, trimmed, strict=True):
        ended = chunk.finish_reason == FinishReason("stop", stop)
        assert chunk.text == without.text + stop * ended
        assert stop not in without.text


def test_stop_regex(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    """The pattern matches with the most likely first token, so it acts like an EOS token."""
    search, pattern, token = BeamSearch(3, 0.0), "[N]", 49
    expected = reference(loaded_model, [5, 6, 7, 8], search, 8, ends=frozenset({1, token}))
    wanted = request(beam_search=search, n=3, stop_regex=[pattern], stop_token_ids=(), max_tokens=8)
    answer = run(search_one(make_engine(), wanted))
    assert found(answer) == expected
    assert {chunk.finish_reason for chunk in answer} > {FinishReason("stop", pattern)}
    for chunk in answer:
        assert ("N" in chunk.text) is (chunk.finish_reason == FinishReason("stop", pattern))


def test_stop_string_across_tokens(make_engine: BuildEngine) -> None:
    engine = make_engine()
    wanted: dict[str, Any] = {"beam_search": BeamSearch(3, 0.0), "n": 3, "stop_token_ids": (), "max_tokens": 8}
    plain = run(search_one(engine, request(**wanted)))
    texts = [chunk.text.replace("\ufffd", " ") for chunk in plain]
    pairs = [text[k : k + 2] for text in texts for k in range(len(text) - 1) if " " not in text[k : k + 2]]
    answer = run(search_one(engine, request(**wanted, stop=pairs)))
    stopped = [chunk for chunk in answer if chunk.finish_reason.matched in pairs]
    assert stopped
    for chunk in answer:
        assert not any(pair in chunk.text for pair in pairs)


def test_min_tokens_and_ignore_eos(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    def edit(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        if len(output) < 4:
            logits[list(ENDS)] = -math.inf
        return logits

    engine = make_engine()
    search = BeamSearch(3, 0.0)
    answer = run(search_one(engine, request(beam_search=search, n=3, min_tokens=4)))
    assert found(answer) == reference(loaded_model, [5, 6, 7, 8], search, edit=edit)
    ignoring = run(search_one(engine, request(beam_search=search, n=3, stop_token_ids=(), ignore_eos=True)))
    assert found(ignoring) == reference(loaded_model, [5, 6, 7, 8], search, ends=frozenset({-1}))


def test_prompt_logprobs(make_engine: BuildEngine) -> None:
    engine = make_engine(enable_deterministic_inference=True)
    (plain,) = run(search_one(engine, request(max_tokens=1, prompt_logprobs=2)))
    for chunk in run(search_one(engine, request(beam_search=BeamSearch(3), n=3, prompt_logprobs=2))):
        assert chunk.prompt_logprobs == plain.prompt_logprobs
        assert len(chunk.prompt_logprobs) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_search": BeamSearch(9)}, "num_beams"),
        ({"beam_search": BeamSearch(2), "n": 3}, "n"),
        ({"beam_search": BeamSearch(2), "temperature": 0.5}, "temperature"),
        ({"beam_search": BeamSearch(2), "temperature": 1, "top_p": 0.5}, "temperature"),
        ({"beam_search": BeamSearch(2), "top_k": 5}, "top_k"),
        ({"beam_search": BeamSearch(2), "min_p": 0.1}, "min_p"),
        ({"beam_search": BeamSearch(2), "max_tokens": 0}, "max_tokens"),
        ({"beam_search": BeamSearch(2), "logprobs": 1}, "logprobs_mode"),
        ({"beam_search": BeamSearch(2), "stop_token_ids": range(65)}, "stop_token_ids"),
    ],
)
def test_refusals(make_engine: BuildEngine, fields: dict[str, Any], param: str) -> None:
    engine = make_engine()
    with pytest.raises(BadRequest) as refused:
        run(search_one(engine, request(**fields)))
    assert refused.value.param == param


class Recorder(LogitsProcessor):
    """Records the rows of `BatchUpdate.added`."""

    added: ClassVar[list[tuple[list[int], list[int]]]] = []

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            for _, _, prompt, output in batch_update.added:
                assert prompt is not None
                Recorder.added.append((list(output), output))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def test_batch_update_of_a_branch_has_its_output(make_engine: BuildEngine) -> None:
    Recorder.added.clear()
    engine = make_engine(logits_processors=(Recorder,))
    answer = run(search_one(engine, request(beam_search=BeamSearch(4), n=4)))
    lengths = [len(initial) for initial, _ in Recorder.added]
    assert lengths[:4] == [0, 1, 1, 1]
    assert max(lengths) > 1
    for initial, live in Recorder.added:
        assert live[: len(initial)] == initial
    # The lists are live: an answer's tokens are those of one of the lists, and its last token.
    for chunk in answer:
        assert any(chunk.token_ids[: len(live)] == live[: len(chunk.token_ids) - 1] for _, live in Recorder.added)


def test_penalties_apply_to_the_output_of_a_branch(make_engine: BuildEngine, loaded_model: LoadedModel) -> None:
    def edit(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for token in output:
            logits[token] -= 2.0
        return logits

    engine = make_engine()
    search = BeamSearch(3)
    answer = run(search_one(engine, request(beam_search=search, n=3, frequency_penalty=2.0)))
    assert found(answer) == reference(loaded_model, [5, 6, 7, 8], search, edit=edit)


@pytest.mark.thorough
def test_sandbox_keeps_no_state_of_dropped_beams(make_engine: BuildEngine) -> None:
    counts = shipped(
        "Counts",
        """
        import gc
        members = sum(type(each).__name__ == "SequenceState" for each in gc.get_objects())
        assert members <= custom_param_list[0]["most"], members
        return logits
        """,
    )
    engine = make_engine(processor_isolation="sandbox", max_num_seqs=4)
    wanted = request(beam_search=BeamSearch(4), processors=[(counts, {"most": 4})], stop_token_ids=())
    for _ in range(3):
        (chunk,) = run(search_one(engine, wanted))
        assert chunk.finish_reason == FinishReason("length")


def test_branch_cancelled_before_its_first_step_is_closed(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    closed: list[LocalRow] = []
    monkeypatch.setattr(LocalRow, "close", lambda row: closed.append(row))
    internal, waiting = engine._engine, []
    step = internal.step

    def step_then_cancel() -> bool:
        worked = step()
        uses = [use for one in internal._scheduler.running for use in one.sampling_params.processors]
        waiting.extend(use.forked_row for use in uses if use.forked_row is not None)
        if waiting:
            internal.abort(lambda sequence: True)
        return worked

    monkeypatch.setattr(internal, "step", step_then_cancel)
    processors: list[Any] = [(CHECKS_HISTORY, {"calls": []})]
    (chunk,) = run(search_one(engine, request(beam_search=BeamSearch(3), processors=processors)))
    assert chunk.finish_reason == FinishReason("abort")
    assert len(waiting) == 2
    assert set(waiting) <= set(closed)
    assert_free(engine)


async def test_waiting_search_can_be_cancelled(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=3)
    running = asyncio.ensure_future(search_one(engine, request("a", max_tokens=300, stop_token_ids=())))
    await until(lambda: engine.stats().running)
    waits = asyncio.ensure_future(search_one(engine, request("b", beam_search=BeamSearch(3), n=2)))
    await until(lambda: engine.stats().waiting)
    engine.abort("b")
    cancelled = await waits
    engine.abort("a")
    await running
    assert [chunk.finish_reason for chunk in cancelled] == [FinishReason("abort")] * 2
    assert_free(engine)
