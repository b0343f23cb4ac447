"""Installed processors and named callables, through the whole engine."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.builtin_processors.grammars.checker import GrammarChecker
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.batch_processors.slot_interface import (
    LogitsContext,
    LogitsProcRequestState,
    SlotLogitsProcessor,
)
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.refusals import BadRequest, ServiceUnavailable, StartError
from logitship.server.requests.messages import (
    CallableRequest,
    ProcessorRequest,
)
from tests.helpers.coroutines import run
from tests.helpers.engine_requests import BuildEngine, generate, generate_all, generate_together, installed
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import shipped_by_row


class Target(LogitsProcessor):
    """Allows only `extra_args["target_token"]`, without checking that it is in the vocabulary."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.rows: BatchRows[int] = BatchRows(lambda params, *_: (params.extra_args or {}).get("target_token"))

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = (sampling_params.extra_args or {}).get("target_token", 0)
        if target == "crash":
            raise RuntimeError("not prepared for that")
        if not isinstance(target, int):
            raise ValueError(f"target_token has to be an integer, not {target!r}")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.rows.update(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[1] == self.vocab_size
        for row, target in self.rows.items():
            kept = logits[row, target].clone()
            logits[row] = -torch.inf
            logits[row, target] = kept
        return logits


class Force(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list):
            logits[row] = -torch.inf
            logits[row, params["token"]] = 0.0
        return logits


request = partial(any_request, max_tokens=6, temperature=0.0)


@pytest.fixture
def callables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create a module of callables that requests can name."""
    (tmp_path / "my_callables.py").write_text(
        """
from os import system
from subprocess import Popen
import torch

class Countdown:
    '''Forces start, start - 1, …; its state is an attribute.'''
    def __init__(self, start):
        if start < 0:
            raise ValueError("start is negative")
        self.next = start
    def __call__(self, prompt_token_ids, output_token_ids, logits):
        assert len(prompt_token_ids) == 5
        logits[:] = -float("inf")
        logits[self.next] = 0.0
        self.next -= 1
        return logits

def forbid_repeats(output_token_ids, logits):
    logits[output_token_ids] = -float("inf")
    return logits

def fails_at_two(output_token_ids, logits):
    if len(output_token_ids) == 2:
        raise LookupError("lost")
    return logits

class HuggingFace:
    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1]] = 1000.0
        return scores
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_callables", None)


def test_busy_grammar_checker_is_a_503(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy checker is a temporary error: the client may retry."""

    def busy(*_: object, **__: object) -> None:
        raise PreparationUnavailable("try again later")

    engine = make_engine()
    wanted = request(processors=[ProcessorRequest(InstalledProcessor("grammar"), {"regex": "[0-9]+"}, own=True)])
    with monkeypatch.context() as patch:
        patch.setattr(GrammarChecker, "check", busy)
        with pytest.raises(ServiceUnavailable, match="try again later"):
            run(generate(engine, wanted))
    found = engine.tokenizer.decode(run(generate(engine, wanted)).token_ids)
    assert len(found) == 6
    assert found.isdigit()


class SlotTarget(SlotLogitsProcessor):
    """The same for vLLM's model runner V2, after the first `after` output tokens."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.states = req_states
        self.targets: dict[int, dict[str, int] | None] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        Target.validate_params(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.targets[req_idx] = sampling_params.extra_args
        return bool(self.targets[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            arguments = self.targets[slot] or {}
            num_output = int(self.states.total_len.np[slot] - self.states.prompt_len.np[slot])
            if "target_token" in arguments and num_output >= arguments.get("after", 0):
                kept = logits[row, arguments["target_token"]].clone()
                logits[row] = -torch.inf
                logits[row, arguments["target_token"]] = kept
        return logits


@pytest.mark.parametrize("speculative", [{}, {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}])
def test_processor_of_model_runner_v2(make_engine: BuildEngine, speculative: dict[str, Any]) -> None:
    engine = make_engine(logits_processors=(SlotTarget,), **speculative)
    wanted = [
        request("a"),
        request("b", extra_args={"target_token": 77}, temperature=1.0),
        request("c", extra_args={"target_token": 78, "after": 3}),
    ]
    plain, forced, late = run(generate_together(engine, wanted))
    assert 77 not in plain.token_ids
    assert 78 not in plain.token_ids
    assert forced.token_ids == [77] * 6
    assert late.token_ids[3:] == [78] * 3
    assert 78 not in late.token_ids[:3]
    with pytest.raises(BadRequest, match="target_token has to be an integer"):
        run(generate(engine, request("d", extra_args={"target_token": "x"})))


def test_fault_of_a_processor_of_model_runner_v2(make_engine: BuildEngine) -> None:
    engine = make_engine(logits_processors=(SlotTarget,))
    targets = {"a": None, "b": 9, "c": 10**6}
    wanted = [request(rid, extra_args=target and {"target_token": target}) for rid, target in targets.items()]
    _, other, failed = run(generate_together(engine, wanted))
    assert other.token_ids == [9] * 6
    assert failed.token_ids == []
    assert failed.error.type == "BatchProcessorFault"
    assert "SlotTarget failed on this request" in failed.error.message


def test_batch_processor_only_edits_requests_that_ask(make_engine: BuildEngine) -> None:
    engine = make_engine(logits_processors=(Target,))
    wanted = [request("a"), request("b", extra_args={"target_token": 77}, temperature=1.0)]
    plain, forced = run(generate_together(engine, wanted))
    assert forced.token_ids == [77] * 6
    assert 77 not in plain.token_ids


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("x", "target_token has to be an integer, not 'x'"),
        ("crash", "Target does not take these parameters: RuntimeError: not prepared for that"),
    ],
)
def test_batch_processor_validates_params_at_admission(make_engine: BuildEngine, target: Any, message: str) -> None:
    engine = make_engine(logits_processors=(Target,))
    with pytest.raises(BadRequest, match=message):
        run(generate(engine, request("a", extra_args={"target_token": target})))


@pytest.mark.parametrize("target", [10**6, -(10**6), 1 << 80])
def test_batch_processor_fault_ends_only_its_request(make_engine: BuildEngine, target: int) -> None:
    engine = make_engine(logits_processors=(Target,))
    good = [request("a"), request("b", extra_args={"target_token": 9}), request("c", seed=4, temperature=1.0)]
    alone = run(generate_together(engine, good))
    bad = request("d", extra_args={"target_token": target})
    *others, failed = run(generate_together(engine, [*good, bad]))
    assert [output.token_ids for output in others] == [output.token_ids for output in alone]
    assert failed.token_ids == []
    assert failed.error.type == "BatchProcessorFault"
    assert failed.error.status_code == 500
    assert "Target failed on this request" in failed.error.message
    assert engine.healthy


@pytest.mark.parametrize("name", ["no_such:Plugin", "logitship.server.config:DEFAULT_MODEL"])
def test_unloadable_batch_processor_stops_the_start(make_engine: BuildEngine, name: str) -> None:
    with pytest.raises(StartError, match=f"logits processor {name}"):
        make_engine(logits_processors=(name,))


class Incomplete(CustomLogitProcessor):
    @abstractmethod
    def edit(self) -> None: ...

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        return logits


class Failing(Force):
    def __init__(self) -> None:
        raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("processor", "reason"), [(Incomplete, "TypeError: .*edit"), (Failing, "ZeroDivisionError: no")]
)
def test_installed_processor_that_cannot_be_created(processor: type, reason: str, make_engine: BuildEngine) -> None:
    with pytest.raises(StartError, match=f"logits processor {__name__}:{processor.__name__}: {reason}"):
        make_engine(logits_processors=(processor,))


def test_installed_row_level_processor_by_name(make_engine: BuildEngine) -> None:
    engine = make_engine(logits_processors=(Force,), enable_custom_logit_processor=False)
    name = f"{Force.__module__}:Force"
    wanted = [request("a"), request("b", processors=[installed(name, token=33)])]
    plain, forced = run(generate_together(engine, wanted))
    assert forced.token_ids == [33] * 6
    assert plain.token_ids != forced.token_ids
    assert [(receipt.name, receipt.steps) for receipt in forced.receipts] == [(name, 6)]


def test_named_callable_has_separate_state_per_sequence(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables\..*")
    counting = CallableRequest("my_callables.Countdown", (50,))
    for output in run(generate_all(engine, request(processors=[counting], n=2))):
        assert output.token_ids == [50, 49, 48, 47, 46, 45]
        assert [(receipt.name, receipt.steps) for receipt in output.receipts] == [("my_callables.Countdown", 6)]


def test_functions_and_hugging_face_objects(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables[.:].*")
    names = ("my_callables.forbid_repeats", "my_callables:HuggingFace")
    wanted = [request(name, processors=[CallableRequest(name)]) for name in names]
    repeats, lengths = run(generate_together(engine, wanted))
    assert len(set(repeats.token_ids)) == 6
    assert lengths.token_ids == [5, 6, 7, 8, 9, 10]


def test_processors_run_in_list_order(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables\..*")
    shift = shipped_by_row("Shift", "top = int(row.argmax()) + params['by']; row[:] = -torch.inf; row[top] = 0.0")
    counting = CallableRequest("my_callables.Countdown", (50,))
    counted_first = request("a", processors=[counting, (shift, {"by": 3}), (shift, {"by": 10})])
    counted_last = request("b", processors=[(shift, {"by": 3}), counting])
    after, before = run(generate_together(engine, [counted_first, counted_last]))
    assert after.token_ids == [63, 62, 61, 60, 59, 58]
    assert before.token_ids == [50, 49, 48, 47, 46, 45]


def test_callable_fault_ends_only_its_request(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables\..*")
    repeats = CallableRequest("my_callables.forbid_repeats")
    good = request("a", processors=[repeats])
    failing = request("b", processors=[CallableRequest("my_callables.fails_at_two")])
    alone = run(generate(engine, good))
    other, failed = run(generate_together(engine, [good, failing]))
    assert other.token_ids == alone.token_ids
    assert len(failed.token_ids) == 2
    assert failed.error.type == "ProcessorFault"
    assert "lost" in failed.error.message
    assert "fails_at_two" in failed.error.traceback


@pytest.mark.parametrize(
    ("pattern", "wanted", "message"),
    [
        (None, "my_callables.forbid_repeats", "not supported by this server. See --logits-processor-pattern"),
        (r"my_calla", "my_callables.forbid_repeats", "is not allowed by this server"),
        (r"my_callables\.x", "os.system", "'os.system' is not allowed by this server"),
        (r".*", "my_callables.missing", "could not be resolved: .*missing"),
        (r".*", "no_such_module.thing", "could not be resolved: .*no_such_module"),
        (r".*", "my_callables", "could not be resolved: .*not of the form"),
        (r".*", CallableRequest("my_callables.Countdown", (-1,)), "could not be resolved: .*start is negative"),
        (r".*", CallableRequest("my_callables.Countdown"), "could not be resolved: .*start"),
        (
            r"my_callables\..*",
            CallableRequest("my_callables.Popen", (["true"],)),
            "it is subprocess.Popen, which",
        ),
        (r"my_callables\..*", "my_callables.system", "it is posix.system, which is not allowed"),
        (r"my_callables:.*", "my_callables:torch.load", "not one of a class"),
        (r".*", "logitship.builtin_processors.parameter_processors.MinPLogitsProcessor", "is a batch processor"),
    ],
)
def test_refused_callable_names(
    make_engine: BuildEngine, callables: None, pattern: str | None, wanted: Any, message: str
) -> None:
    engine = make_engine(logits_processor_pattern=pattern)
    processor = wanted if isinstance(wanted, CallableRequest) else CallableRequest(wanted)
    with pytest.raises(BadRequest, match=message) as caught:
        run(generate(engine, request(processors=[processor])))
    assert caught.value.param == "processors[0]"


def test_pattern_must_be_a_regular_expression(make_engine: BuildEngine) -> None:
    with pytest.raises(ValueError, match="logits_processor_pattern is not a regular expression"):
        make_engine(logits_processor_pattern="(")
