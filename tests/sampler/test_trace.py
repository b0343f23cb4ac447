"""Traces of a step, compared with the logits recorded at each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from logitship.builtin_processors.parameter_processors import LogitBiasLogitsProcessor, MinPLogitsProcessor
from logitship.client.records import TraceStage
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.sampler.sampling_params import InvalidSamplingParams, SamplingParams
from logitship.sampler.trace import RowTrace, StepTrace
from tests.sampler.conftest import Load

MODEL = ModelView(4, frozenset(), None)

VOCAB = 8
CPU = torch.device("cpu")
INF = math.inf


def sample(logits: torch.Tensor, rows: Sequence[SamplingParams], among: Sequence[int] | None = None) -> SamplerOutput:
    """Sample one step of a batch, or of the rows `among`."""
    shipped = ShippedProcessors(None, CPU, False, model=ModelView(VOCAB, frozenset({1}), "tokenizer"))
    edits = LogitsProcessors([LogitBiasLogitsProcessor(None, CPU, False), MinPLogitsProcessor(None, CPU, False)])
    sampler = Sampler(VOCAB, CPU, edits, shipped)
    sampler.update_state(BatchUpdate(len(rows), [], [(i, params, [], []) for i, params in enumerate(rows)], []))
    return sampler.sample(logits.clone(), among)


def params_with(*processors: LoadedProcessor, **params: Any) -> SamplingParams:
    uses = tuple(ProcessorUse(processor, {}, "r") for processor in processors)
    return SamplingParams(processors=uses, **{"temperature": 0, "trace": 3, **params})


def ban_2(logits: torch.Tensor, params: Any) -> torch.Tensor:
    logits[:, 2] = -INF
    return logits


def double(logits: torch.Tensor, params: Any) -> torch.Tensor:
    return logits * 2


def fail(logits: torch.Tensor, params: Any) -> torch.Tensor:
    raise RuntimeError("no")


def numbers(logits: torch.Tensor, trace: RowTrace) -> list[float | None]:
    """Return the expected trace stage for these logits."""
    of_candidates = logits.log_softmax(-1)[list(trace.candidates)].tolist()
    return [None if logprob == -INF else pytest.approx(logprob, abs=1e-6) for logprob in of_candidates]


def test_every_stage_shows_its_logits(load: Load) -> None:
    logits = torch.tensor([0.0, 1.0, 5.0, 2.0, 4.0, 3.0, -1.0, -2.0])
    params = params_with(
        load(ban_2, "Ban"), load(double, "Double"), temperature=0.5, top_k=2, seed=1, logit_bias={3: 1.5}, trace=2
    )
    output = sample(logits[None], [params])
    (trace,) = output.traces
    assert trace is not None
    assert trace.token_id == output.token_ids[0]
    requested = logits.clone()
    requested[3] += 1.5
    banned = requested.clone()
    banned[2] = -INF
    doubled = banned * 2
    sampling = doubled / 0.5
    sampling[[token for token in range(VOCAB) if token not in (3, 4)]] = -INF
    seen = [logits, requested, banned, doubled, sampling]
    assert [(stage.stage, stage.name) for stage in trace.stages] == [
        ("model", None),
        ("request", None),
        ("processor", "Ban"),
        ("processor", "Double"),
        ("sampling", None),
    ]
    # The top two of each stage: 2 and 4, 2 and 4, 4 and 3, 4 and 3. In the model's order.
    assert trace.candidates == (2, 4, 3)
    for stage, row in zip(trace.stages, seen, strict=True):
        assert list(stage.logprobs) == numbers(row, trace)
        assert stage.num_allowed == int((row > -INF).sum())
    assert trace.stages[2].digest == params.processors[0].processor.digest
    assert trace.stages[4].num_allowed == 2


def test_greedy_row_samples_from_one_token(load: Load) -> None:
    (trace,) = sample(torch.arange(8.0)[None], [params_with(load(ban_2, "Ban"))]).traces
    assert trace is not None
    assert trace.token_id == 7
    assert trace.stages[-1] == TraceStage("sampling", logprobs=(0.0, None, None), num_allowed=1)


def test_unlikely_sampled_token_is_a_candidate() -> None:
    logits = torch.linspace(0.1, 0, VOCAB)
    sampled = set()
    for seed in range(40):
        (trace,) = sample(logits[None], [SamplingParams(seed=seed, trace=1)]).traces
        assert trace is not None
        assert set(trace.candidates) == {0, trace.token_id}
        sampled.add(trace.token_id)
    assert len(sampled) > 4


def test_fewer_allowed_tokens_than_requested() -> None:
    (trace,) = sample(
        torch.zeros(1, VOCAB), [SamplingParams(temperature=0, allowed_token_ids=[3, 5], trace=100)]
    ).traces
    assert trace is not None
    assert trace.candidates == tuple(range(VOCAB))
    assert [stage.num_allowed for stage in trace.stages] == [8, 2, 1]
    assert trace.stages[1].logprobs[0] is None


def test_stage_without_tokens_has_no_candidates(load: Load) -> None:
    """A processor may allow a token again that the request's parameters forbid."""

    def force_5(logits: torch.Tensor, params: Any) -> torch.Tensor:
        logits[:, 5] = 1.0
        return logits

    params = params_with(load(force_5, "Force"), allowed_token_ids=[5], bad_words_token_ids=[[5]], trace=1)
    (trace,) = sample(torch.arange(8.0)[None], [params]).traces
    assert trace is not None
    assert trace.candidates == (7, 5)
    assert [stage.num_allowed for stage in trace.stages] == [8, 0, 1, 1]
    assert [stage.logprobs for stage in trace.stages[1:]] == [(None, None), (None, 0.0), (None, 0.0)]


def test_mask_appears_before_and_after_other_processors(load: Load) -> None:
    mask = LoadedProcessor("sha256:mask", "Mask", InProcessExecutor({}, MODEL), ban_2, is_mask=True)
    (trace,) = sample(torch.arange(8.0)[None], [params_with(load(double, "Double"), mask)]).traces
    assert trace is not None
    shown = [(stage.name, stage.again) for stage in trace.stages if stage.stage == "processor"]
    assert shown == [("Mask", False), ("Double", False), ("Mask", True)]


def test_untraced_and_failed_rows_have_no_trace(load: Load) -> None:
    rows = [
        params_with(load(double, "Double"), trace=None),
        params_with(load(fail, "Fail")),
        params_with(load(double, "Double")),
    ]
    output = sample(torch.randn(3, VOCAB), rows)
    assert [trace is None for trace in output.traces] == [True, True, False]


def test_trace_does_not_change_results(load: Load) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, VOCAB) * 3
    for top_p in (1.0, 0.7):
        params = [
            {"temperature": 0.8 if row % 2 else 0, "top_p": top_p, "seed": row, "logprobs": 2} for row in range(6)
        ]
        processor = load(ban_2, "Ban")
        plain = sample(logits, [params_with(processor, **each, trace=None) for each in params])
        traced = sample(logits, [params_with(processor, **each) for each in params])
        assert traced.token_ids == plain.token_ids
        assert traced.logprobs == plain.logprobs
        assert plain.traces == [None] * 6


@pytest.mark.parametrize("among", [[0, 2], [1], [1, 2]])
def test_draft_rows_have_same_trace_as_whole_batch(among: list[int], load: Load) -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, VOCAB)
    rows = [params_with(load(ban_2, "Ban")), params_with(load(double, "Double")), params_with(load(ban_2, "Ban"))]
    whole = sample(logits, rows).traces
    some = sample(logits[among], rows, among).traces
    assert some == [whole[row] for row in among]


def test_nothing_is_recorded_without_traced_rows() -> None:
    trace = StepTrace({})
    logits = torch.zeros(2, VOCAB)
    trace.record("model", logits)
    trace.record_sampled(logits, torch.zeros(2, dtype=torch.int64))
    assert trace.finish([1, 2], ()) == [None, None]


@pytest.mark.parametrize("top", [0, -1, 101, True, 2.0])
def test_trace_out_of_range_is_rejected(top: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match="trace: must be an integer from 1 to 100"):
        SamplingParams(trace=top)
