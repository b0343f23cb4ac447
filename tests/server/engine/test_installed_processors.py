"""Installed processors and named callables, through the whole engine."""

from __future__ import annotations

import asyncio
import sys
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.builtin_processors.grammars.checker import GrammarChecker
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.batch_processors.slot_interface import (
    LogitsContext,
    LogitsProcRequestState,
    SlotLogitsProcessor,
)
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, ServiceUnavailable, StartError
from logitship.server.requests.messages import (
    AttachedProcessor,
    CallableRequest,
    GenerationChunk,
    GenerationRequest,
    ProcessorRequest,
)

BuildEngine = Callable[..., AsyncEngine]


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


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())


def request(rid: str, *processors: AttachedProcessor, n: int = 1, **params: Any) -> GenerationRequest:
    defaults = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}
    return GenerationRequest(
        rid=rid,
        prompt_token_ids=[4 + byte for byte in b"hello"],
        sampling_params=SamplingParams(**(defaults | params)),
        processors=processors,
        n=n,
    )


async def tokens(engine: AsyncEngine, wanted: GenerationRequest) -> tuple[list[int], GenerationChunk]:
    found: list[int] = []
    async for chunk in await engine.submit(wanted):
        found += chunk.token_ids
        last = chunk
    return found, last


async def all_tokens(engine: AsyncEngine, *wanted: GenerationRequest) -> list[tuple[list[int], GenerationChunk]]:
    return list(await asyncio.gather(*(tokens(engine, each) for each in wanted)))


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
    wanted = ProcessorRequest(InstalledProcessor("grammar"), {"regex": "[0-9]+"}, own=True)
    with monkeypatch.context() as patch:
        patch.setattr(GrammarChecker, "check", busy)
        with pytest.raises(ServiceUnavailable, match="try again later"):
            run(tokens(engine, request("a", wanted)))
    found, _ = run(tokens(engine, request("a", wanted)))
    assert len(engine.tokenizer.decode(found)) == 6
    assert engine.tokenizer.decode(found).isdigit()


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
    plain, forced, late = run(
        all_tokens(
            engine,
            request("a"),
            request("b", extra_args={"target_token": 77}, temperature=1.0),
            request("c", extra_args={"target_token": 78, "after": 3}),
        )
    )
    assert 77 not in plain[0]
    assert 78 not in plain[0]
    assert forced[0] == [77] * 6
    assert late[0][3:] == [78] * 3
    assert 78 not in late[0][:3]
    with pytest.raises(BadRequest, match="target_token has to be an integer"):
        run(tokens(engine, request("d", extra_args={"target_token": "x"})))


def test_fault_of_a_processor_of_model_runner_v2(make_engine: BuildEngine) -> None:
    engine = make_engine(logits_processors=(SlotTarget,))
    good = [request("a"), request("b", extra_args={"target_token": 9})]
    *others, (found, last) = run(all_tokens(engine, *good, request("c", extra_args={"target_token": 10**6})))
    assert others[1][0] == [9] * 6
    assert found == []
    assert last.finish_reason.error.type == "BatchProcessorFault"
    assert "SlotTarget failed on this request" in last.finish_reason.error.message


def test_batch_processor_only_edits_requests_that_ask(make_engine: BuildEngine) -> None:
    engine = make_engine(logits_processors=(Target,))
    plain, forced = run(
        all_tokens(engine, request("a"), request("b", extra_args={"target_token": 77}, temperature=1.0))
    )
    assert forced[0] == [77] * 6
    assert 77 not in plain[0]


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
        run(tokens(engine, request("a", extra_args={"target_token": target})))


@pytest.mark.parametrize("target", [10**6, -(10**6), 1 << 80])
def test_batch_processor_fault_ends_only_its_request(make_engine: BuildEngine, target: int) -> None:
    engine = make_engine(logits_processors=(Target,))
    good = [request("a"), request("b", extra_args={"target_token": 9}), request("c", seed=4, temperature=1.0)]
    alone = run(all_tokens(engine, *good))
    bad = request("d", extra_args={"target_token": target})
    *others, (found, last) = run(all_tokens(engine, *good, bad))
    assert [token_ids for token_ids, _ in others] == [token_ids for token_ids, _ in alone]
    assert found == []
    assert last.finish_reason is not None
    assert last.finish_reason.error is not None
    assert last.finish_reason.error.type == "BatchProcessorFault"
    assert last.finish_reason.error.status_code == 500
    assert "Target failed on this request" in last.finish_reason.error.message
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
    processor = ProcessorRequest(InstalledProcessor(name), {"token": 33})
    plain, forced = run(all_tokens(engine, request("a"), request("b", processor)))
    assert forced[0] == [33] * 6
    assert plain[0] != forced[0]
    assert [(receipt.name, receipt.steps) for receipt in forced[1].receipts] == [(name, 6)]


def test_named_callable_has_separate_state_per_sequence(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables\..*")
    counting = CallableRequest("my_callables.Countdown", (50,))

    async def both() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {0: [], 1: []}
        async for chunk in await engine.submit(request("a", counting, n=2)):
            found[chunk.index] += chunk.token_ids
            last = chunk
        assert [(receipt.name, receipt.steps) for receipt in last.receipts] == [("my_callables.Countdown", 6)]
        return found

    assert run(both()) == {0: [50, 49, 48, 47, 46, 45], 1: [50, 49, 48, 47, 46, 45]}


def test_functions_and_hugging_face_objects(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables[.:].*")
    repeats, lengths = run(
        all_tokens(
            engine,
            request("a", CallableRequest("my_callables.forbid_repeats")),
            request("b", CallableRequest("my_callables:HuggingFace")),
        )
    )
    assert len(set(repeats[0])) == 6
    assert lengths[0] == [5, 6, 7, 8, 9, 10]


def test_processors_run_in_list_order(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables\..*")
    source = "from logitship import CustomLogitProcessor\n\nclass Last(CustomLogitProcessor):\n" + (
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        for row, params in zip(logits, custom_param_list):\n"
        "            top = int(row.argmax()) + params['by']\n"
        "            row[:] = -float('inf')\n"
        "            row[top] = 0.0\n"
        "        return logits\n"
    )

    def shift(by: int) -> ProcessorRequest:
        return ProcessorRequest(SourceProcessor(source, "Last"), {"by": by})

    counting = CallableRequest("my_callables.Countdown", (50,))
    after, before = run(
        all_tokens(engine, request("a", counting, shift(3), shift(10)), request("b", shift(3), counting))
    )
    assert after[0] == [63, 62, 61, 60, 59, 58]
    assert before[0] == [50, 49, 48, 47, 46, 45]


def test_callable_fault_ends_only_its_request(make_engine: BuildEngine, callables: None) -> None:
    engine = make_engine(logits_processor_pattern=r"my_callables\..*")
    repeats = CallableRequest("my_callables.forbid_repeats")
    alone = run(tokens(engine, request("a", repeats)))
    other, (found, last) = run(
        all_tokens(engine, request("a", repeats), request("b", CallableRequest("my_callables.fails_at_two")))
    )
    assert other[0] == alone[0]
    assert len(found) == 2
    assert last.finish_reason is not None
    assert last.finish_reason.error is not None
    assert last.finish_reason.error.type == "ProcessorFault"
    assert "lost" in last.finish_reason.error.message
    assert "fails_at_two" in last.finish_reason.error.traceback


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
        run(tokens(engine, request("a", processor)))
    assert caught.value.param == "processors[0]"


def test_pattern_must_be_a_regular_expression(make_engine: BuildEngine) -> None:
    with pytest.raises(ValueError, match="logits_processor_pattern is not a regular expression"):
        make_engine(logits_processor_pattern="(")
