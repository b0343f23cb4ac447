"""Forks of sequences: a processor's state is copied and independent from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.callable_factory import CallableFactory
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.callable_executor import CallableExecutor
from logitship.sampler.processors.executor import ExecutorRow, ExecutorSequence, LoadedProcessor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams

VOCAB = 12
TOKENIZER = object()
MODEL = ModelView(VOCAB, frozenset({1}), TOKENIZER)


def attach(processor: LoadedProcessor, output: list[int], prepared: Any = None, **params: Any) -> ExecutorRow:
    sequence = ExecutorSequence("r", params, [1, 2], output, SamplingParams(), MODEL, prepared)
    return processor.executor.attach(processor, sequence)


def call(processor: LoadedProcessor, *rows: ExecutorRow) -> list[list[float]]:
    logits = torch.zeros(len(rows), VOCAB)
    outcome = processor.executor.group(processor, rows).call(logits)
    assert not outcome.faults
    return logits.tolist()


def test_fork_has_history_and_copy_of_state(load: Callable[..., LoadedProcessor]) -> None:
    seen: list[tuple[list[int], list[int], list[str], bool, bool]] = []

    def watch(logits: torch.Tensor, param_list: list[dict[str, Any]]) -> torch.Tensor:
        for params in param_list:
            req = params["__req__"]
            shared = req.state.setdefault("log", params["log"])
            shared.append(len(req.output_ids))
            req.state["view"] = req
            req.own_attribute = getattr(req, "own_attribute", shared)
            is_same = shared is params["log"] is req.own_attribute and req.state["view"] is req
            is_shared = req.tokenizer is TOKENIZER
            seen.append((req.output_ids[:], shared[:], params["words"], is_same, is_shared))
        return logits

    processor = load(watch, "Watch")
    output: list[int] = []
    words = ["a"]
    row = attach(processor, output, log=[], words=words)
    call(processor, row)
    output.append(5)
    call(processor, row)

    fork_output = [5]
    fork = row.fork(fork_output)
    output.append(6)
    fork_output.append(7)
    for each in (row, fork):
        call(processor, each)
    assert seen[2:] == [([5, 6], [0, 1, 2], ["a"], True, True), ([5, 7], [0, 1, 2], ["a"], True, True)]
    fork_output.append(8)
    call(processor, fork)
    call(processor, row)
    assert [(output, log) for output, log, *_ in seen[4:]] == [([5, 7, 8], [0, 1, 2, 3]), ([5, 6], [0, 1, 2, 2])]


def test_edits_of_the_view_are_copied(load: Callable[..., LoadedProcessor]) -> None:
    outputs = []

    def careless(logits: torch.Tensor, param_list: list[dict[str, Any]]) -> torch.Tensor:
        req = param_list[0]["__req__"]
        outputs.append(list(req.output_ids))
        del req.tokenizer, req.sampling_params
        req.output_ids = "mine"
        return logits

    processor = load(careless, "Careless")
    row = attach(processor, [])
    call(processor, row)
    fork_output: list[int] = []
    fork = row.fork(fork_output)
    fork_output.append(3)
    with pytest.raises(AssertionError):  # it deletes an attribute twice
        call(processor, fork)
    assert outputs == [[], [3]]


def test_prepared_parameters_are_shared(load: Callable[..., LoadedProcessor]) -> None:
    kept, prepared = [], object()

    def keep(logits: torch.Tensor, param_list: list[dict[str, Any]]) -> torch.Tensor:
        (params,) = param_list
        params["__req__"].state.setdefault("calls", []).append(prepared)
        kept.append((params["big"], params["__prepared__"], params["__req__"].state["calls"]))
        return logits

    processor = load(keep, "Keep")
    row = attach(
        processor, [], prepared, big=threading.Lock()
    )  # a lock cannot be copied, but prepared parameters are shared
    call(processor, row)
    fork = row.fork([])
    call(processor, fork)
    call(processor, row)
    assert kept[0][:2] == kept[1][:2]
    assert kept[0][1] is prepared
    assert kept[1][2] == kept[2][2] == [prepared, prepared]
    assert kept[1][2] is not kept[2][2]


class Uncopyable:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        torch.set_grad_enabled(False)
        raise SystemExit("not me")


@pytest.mark.parametrize(
    ("value", "reason"), [(threading.Lock(), "TypeError: cannot pickle"), (Uncopyable(), "SystemExit: not me")]
)
def test_uncopyable_state_is_a_fault(load: Callable[..., LoadedProcessor], value: Any, reason: str) -> None:
    def keep(logits: torch.Tensor, param_list: list[dict[str, Any]]) -> torch.Tensor:
        param_list[0]["__req__"].state["kept"] = value
        return logits

    processor = load(keep, "Keep")
    row = attach(processor, [])
    call(processor, row)
    with torch.enable_grad(), pytest.raises(ProcessorFault) as raised:
        row.fork([])
    fault = raised.value
    assert (fault.kind, fault.name, fault.digest) == ("uncopyable", "Keep", processor.digest)
    assert f"which beam search requires: {reason}" in fault.message
    call(processor, row)  # the original still works


class Counts:
    """A request-level callable with state and a tokenizer that must not be copied."""

    def __init__(self) -> None:
        self.calls = 0
        self.lengths: list[int] = []

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.lengths.append(len(output_token_ids))
        logits[0], logits[1] = self.calls, sum(self.lengths)
        return logits


class Clones(Counts):
    """A callable with `clone()` that cannot be copied otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def clone(self) -> Clones:
        fork = Clones()
        fork.calls, fork.lengths = self.calls, list(self.lengths)
        return fork


@pytest.mark.parametrize("target", [Counts, Clones])
def test_forked_callable_has_its_own_state(target: type[Counts]) -> None:
    processor = LoadedProcessor("sha256:0", "Counts", CallableExecutor(), CallableFactory(target)(), per_sequence=True)
    output = [4]
    row = attach(processor, output)
    assert call(processor, row)[0][:2] == [1, 1]
    fork_output = [4]
    fork = row.fork(fork_output)
    output.append(5)
    fork_output += [6, 7]
    assert call(processor, row)[0][:2] == [2, 3]
    assert call(processor, fork)[0][:2] == [2, 4]
    assert call(processor, row)[0][:2] == [3, 5]


class Restarts(Counts):
    """A callable whose `clone()` leaves its state out, like those of logits-processor-zoo."""

    def clone(self) -> Restarts:
        return Restarts()


def test_fork_keeps_state_that_clone_leaves_out() -> None:
    processor = LoadedProcessor("sha256:0", "R", CallableExecutor(), CallableFactory(Restarts())(), per_sequence=True)
    row = attach(processor, [4])
    call(processor, row)
    assert call(processor, row.fork([4]))[0][0] == 2


def test_fork_of_hugging_face_callable_has_its_own_tokens() -> None:
    def last(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, 0], scores[0, 1] = input_ids[0, -1], input_ids.shape[1]
        return scores

    processor = LoadedProcessor("sha256:0", "last", CallableExecutor(), last, per_sequence=True)
    output = [4]
    row = attach(processor, output)
    assert call(processor, row)[0][:2] == [4, 3]
    fork_output = [4]
    fork = row.fork(fork_output)
    output.append(5)
    fork_output += [6, 7]
    assert call(processor, fork)[0][:2] == [7, 5]
    assert call(processor, row)[0][:2] == [5, 4]


class Closing:
    """An executor row that counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def fork(self, output_token_ids: list[int]) -> Closing:
        return Closing()

    def close(self) -> None:
        self.closed += 1


def shipped() -> ShippedProcessors:
    return ShippedProcessors(None, torch.device("cpu"), False, model=MODEL)


def test_added_row_uses_its_fork(load: Callable[..., LoadedProcessor]) -> None:
    def count(logits: torch.Tensor, param_list: list[dict[str, Any]]) -> torch.Tensor:
        for row, params in zip(logits, param_list, strict=True):
            state = params["__req__"].state
            row[0] = state["calls"] = state.get("calls", 0) + 1
        return logits

    use = ProcessorUse(load(count, "Count"), {}, "r")
    params, output = SamplingParams(processors=(use,)), [3]
    stage = shipped()
    stage.update_state(BatchUpdate(1, [], [(0, params, [1], output)], []))
    assert stage.apply(torch.zeros(1, VOCAB))[0, 0] == 1
    forked = use.fork([3, 4])
    assert (forked.count.steps, forked.processor) == (1, use.processor)
    stage.update_state(BatchUpdate(2, [], [(1, SamplingParams(processors=(forked,)), [1], [3, 4])], []))
    assert stage.apply(torch.zeros(2, VOCAB))[:, 0].tolist() == [2, 2]
    assert (use.count.steps, forked.count.steps) == (2, 2)
    # Another request starts from scratch.
    other = SamplingParams(processors=(ProcessorUse(use.processor, {}, "s"),))
    stage.update_state(BatchUpdate(2, [], [(1, other, [1], [])], []))
    assert stage.apply(torch.zeros(2, VOCAB))[:, 0].tolist() == [3, 1]


def test_unused_fork_is_closed_once(load: Callable[..., LoadedProcessor]) -> None:
    use = ProcessorUse(load(lambda logits, _: logits, "P"), {}, "r")
    use.executor_row = Closing()
    forked = use.fork([])
    row = forked.forked_row
    assert isinstance(row, Closing)
    forked.drop_fork()
    forked.drop_fork()
    assert row.closed == 1
    use.drop_fork()  # not a fork: the batch closes its row
    assert use.executor_row.closed == 0
