from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.callable_factory import CallableFactory
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.adapter import AdapterLogitsProcessor, CallablesAdapter, RequestLogitsProcessor
from logitship.sampler.batch_processors.interface import LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import FaultSource
from logitship.sampler.sampling_params import SamplingParams
from tests.sampler.conftest import NewRequest

VOCAB = 6


def add_history(prompt: list[int], past: list[int], row: torch.Tensor) -> torch.Tensor:
    row[0] += 100 * sum(prompt) + sum(past)
    return row


def add_length(past: list[int], row: torch.Tensor) -> torch.Tensor:
    return row + len(past)


def add_last(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, 1] += input_ids[0, -1]
    return scores


def raising(past: list[int], row: torch.Tensor) -> torch.Tensor:
    row.fill_(float("nan"))
    raise ValueError("broken")


def spoiling(value: float) -> RequestLogitsProcessor:
    def spoil(past: list[int], row: torch.Tensor) -> torch.Tensor:
        return torch.full_like(row, value)

    return spoil


CALLABLES: dict[str, Any] = {
    "history": add_history,
    "length": add_length,
    "last": add_last,
    "raising": raising,
    "misshapen": lambda past, row: row[1:],
    "nan": spoiling(float("nan")),
    "inf": spoiling(float("inf")),
    "empty": spoiling(float("-inf")),
    "wrong": lambda row: row,
}


class Adapter(AdapterLogitsProcessor):
    """As in vLLM's documentation: `extra_args` names the callable."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("callable") == "":
            raise ValueError("callable is empty")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        name = (params.extra_args or {}).get("callable")
        if name == "unmakable":
            raise ValueError("cannot make it")
        return None if name is None else CALLABLES[name]  # type: ignore[no-any-return]


@pytest.fixture
def asking(new_request: NewRequest) -> NewRequest:
    """Factory of requests for a callable by name: `asking("history", prompt)`."""

    def make(name: str | None, prompt: list[int] | None = None) -> Any:
        params = SamplingParams(extra_args=None if name is None else {"callable": name})
        return new_request(name or "none", params, prompt if prompt is not None else [7])

    return make


@pytest.fixture
def adapter() -> Adapter:
    return Adapter(None, torch.device("cpu"), False)


class Batch:
    """A persistent batch with one batch processor."""

    def __init__(self, processor: AdapterLogitsProcessor, *requests: Any) -> None:
        self.rows: PersistentBatch[Any] = PersistentBatch(16)
        self.processor = processor
        for request in requests:
            self.rows.add(request)

    def step(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[int, ProcessorFault]]:
        self.processor.update_state(self.rows.commit())
        return self.processor.apply(logits), dict(self.processor.take_faults())


def logits_of(rows: int) -> torch.Tensor:
    return torch.arange(float(rows * VOCAB)).view(rows, VOCAB)


def expected_row(request: Any, row: torch.Tensor) -> torch.Tensor:
    """Apply a request's callable by hand to a copy."""
    row = row.clone()
    match request.name:
        case "history":
            row[0] += 100 * sum(request.prompt_token_ids) + sum(request.output_token_ids)
        case "length":
            row += len(request.output_token_ids)
        case "last":
            row[1] += [*request.prompt_token_ids, *request.output_token_ids][-1]
    return row


def test_random_schedules(asking: NewRequest) -> None:
    """Each row is edited by its own request's callable with its own tokens, while requests come, go and move."""
    rng = random.Random(0)
    moves = 0
    for _ in range(20):
        batch = Batch(Adapter(None, torch.device("cpu"), False))
        for _ in range(40):
            for request in rng.sample(batch.rows.members, rng.randint(0, len(batch.rows) // 2)):
                batch.rows.remove(request)
            while len(batch.rows) < 16 and rng.random() < 0.6:
                name = rng.choice(["history", "length", "last", None])
                batch.rows.add(asking(name, [rng.randrange(9) for _ in range(rng.randint(1, 4))]))
            batch.rows.condense()
            if len(batch.rows) > 1 and rng.random() < 0.5:
                batch.rows.swap(*rng.sample(range(len(batch.rows)), 2))
                moves += 1
            logits = torch.randn(len(batch.rows), VOCAB)
            members = batch.rows.members
            expected = [expected_row(request, row) for request, row in zip(members, logits, strict=True)]
            result, faults = batch.step(logits)
            assert faults == {}
            assert result is logits
            assert all(torch.equal(row, wanted) for row, wanted in zip(result, expected, strict=True))
            assert sorted(batch.processor.req_info) == [r for r, m in enumerate(members) if m.name != "none"]
            for request in members:
                request.output_token_ids.append(rng.randrange(9))
    assert moves > 100


def test_rows_run_in_ascending_order(new_request: NewRequest) -> None:
    order: list[int] = []

    class Noting(Adapter):
        def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor:
            def note(past: list[int], row: torch.Tensor) -> torch.Tensor:
                order.append(int(row[0]) // VOCAB)
                return row

            return note

    batch = Batch(Noting(None, torch.device("cpu"), False), *(new_request(str(name)) for name in range(5)))
    batch.rows.swap(0, 4)
    batch.step(logits_of(5))
    assert order == [0, 1, 2, 3, 4]


def test_batch_without_callables_is_unchanged(adapter: Adapter, asking: NewRequest) -> None:
    result, faults = Batch(adapter, asking(None), asking(None)).step(logits_of(2))
    assert torch.equal(result, logits_of(2))
    assert faults == {}
    assert not adapter.req_info


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raising", "exception", "processor Adapter raised ValueError: broken"),
        ("misshapen", "bad_result", "processor Adapter returned shape [5], expected [6]"),
        ("nan", "non_finite", "processor Adapter returned NaN"),
        ("inf", "non_finite", "processor Adapter returned +inf (to force a token, forbid all others)"),
        ("empty", "non_finite", "processor Adapter left no token: every logit of the row is -inf"),
        ("unmakable", "exception", "processor Adapter raised ValueError: cannot make it"),
        ("unknown", "exception", "processor Adapter raised KeyError: 'unknown'"),
        ("wrong", "exception", "processor Adapter raised TypeError: <lambda> takes (row): expected a callable of"),
    ],
)
def test_fault_affects_only_its_row(name: str, kind: str, message: str, adapter: Adapter, asking: NewRequest) -> None:
    rows = ["history", name, "length", "last"]
    result, faults = Batch(adapter, *(asking(row) for row in rows)).step(logits_of(4))
    assert list(faults) == [1]
    fault = faults[1]
    assert (fault.kind, fault.name, fault.digest) == (kind, "Adapter", "")
    assert fault.message.startswith(message)
    assert result[1].eq(0).all()
    others = [0, 2, 3]
    expected = torch.stack([expected_row(asking(rows[row]), logits_of(4)[row]) for row in others])
    assert torch.equal(result[others], expected)


def test_traceback_has_only_author_frames(adapter: Adapter, asking: NewRequest) -> None:
    _, faults = Batch(adapter, asking("raising"), asking("unmakable")).step(logits_of(2))
    assert faults[0].traceback.endswith(", in raising\nValueError: broken\n")
    assert faults[1].traceback.endswith(", in new_req_logits_processor\nValueError: cannot make it\n")
    for fault in faults.values():
        assert "sampler/batch_processors/adapter.py" not in fault.traceback
        assert "author_code.py" not in fault.traceback


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop"), MemoryError("no more")])
@pytest.mark.parametrize("when", ["made", "called"])
def test_any_exception_becomes_a_fault(error: BaseException, when: str, new_request: NewRequest) -> None:
    class Ending(Adapter):
        def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor:
            def end(past: list[int], row: torch.Tensor) -> torch.Tensor:
                raise error

            if when == "made":
                raise error
            return end

    _, faults = Batch(Ending(None, torch.device("cpu"), False), new_request()).step(logits_of(1))
    assert faults[0].message == f"processor Ending raised {type(error).__name__}: {error}"


def test_fault_of_constructor_is_reported_without_apply(adapter: Adapter, asking: NewRequest) -> None:
    """A step without random rows runs no argmax-invariant processor, but collects the faults of all of them."""
    batch = Batch(adapter, asking("length"), asking("unmakable"), asking("history"))
    batch.rows.swap(1, 2)
    adapter.update_state(batch.rows.commit())
    assert [row for row, _ in adapter.take_faults()] == [2]
    assert adapter.take_faults() == []


def test_faults_of_failed_step_are_dropped(adapter: Adapter, asking: NewRequest) -> None:
    broken, healthy = asking("raising"), asking("length")
    batch = Batch(adapter, broken, healthy)
    adapter.update_state(batch.rows.commit())
    adapter.apply(logits_of(2))
    batch.rows.remove(broken)
    _, faults = batch.step(logits_of(1))
    assert faults == {}


def test_missing_prompt_token_ids_are_a_fault(adapter: Adapter, asking: NewRequest) -> None:
    unknown = asking("history")
    unknown.prompt_token_ids = None
    _, faults = Batch(adapter, unknown, asking("length")).step(logits_of(2))
    assert list(faults) == [0]
    assert "add_history takes the prompt's token ids, and this request has none" in faults[0].message


def test_falsy_callable_runs(new_request: NewRequest) -> None:
    """An empty `LogitsProcessorList` is falsy, and so is any callable with a length of 0."""

    class Falsy(list[Any]):
        def __call__(self, past: list[int], row: torch.Tensor) -> torch.Tensor:
            return row + 1

    class Giving(Adapter):
        def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor:
            return Falsy()

    result, _ = Batch(Giving(None, torch.device("cpu"), False), new_request()).step(logits_of(1))
    assert torch.equal(result, logits_of(1) + 1)


def test_fault_does_not_keep_tensors_alive(adapter: Adapter, asking: NewRequest) -> None:
    logits = logits_of(1)
    kept = weakref.ref(logits)
    _, faults = Batch(adapter, asking("misshapen")).step(logits)
    del logits, _
    gc.collect()
    assert faults[0].kind == "bad_result"
    assert kept() is None


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, past: list[int], row: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("three is too many")
        return row + self.calls


@pytest.mark.parametrize("target", [Counter, Counter()])
def test_installed_callable_runs_on_every_request(target: Any, new_request: NewRequest) -> None:
    installed = CallablesAdapter(CallableFactory(target), "mine:Counter")
    first, second = new_request("first"), new_request("second")
    batch = Batch(installed, first)
    assert not installed.is_argmax_invariant()
    assert batch.step(torch.zeros(1, 2))[0].tolist() == [[1.0, 1.0]]
    batch.rows.add(second)
    assert batch.step(torch.zeros(2, 2))[0].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    result, faults = batch.step(torch.zeros(2, 2))
    assert result.tolist() == [[0.0, 0.0], [2.0, 2.0]]
    assert faults[0].message == "processor mine:Counter raised ValueError: three is too many"
    assert faults[0].name == "mine:Counter"


def test_installed_callable_with_failing_constructor(new_request: NewRequest) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ValueError("not today")

    installed = CallablesAdapter(CallableFactory(Broken), "mine:Broken")
    _, faults = Batch(installed, new_request()).step(torch.zeros(1, 2))
    assert "Broken cannot be created: ValueError: not today" in faults[0].message


def test_adapter_is_a_fault_source(adapter: Adapter) -> None:
    assert isinstance(adapter, LogitsProcessor)
    assert isinstance(adapter, FaultSource)
    with pytest.raises(TypeError, match="abstract"):
        AdapterLogitsProcessor(None, torch.device("cpu"), False)  # type: ignore[abstract]
    with pytest.raises(ValueError, match="callable is empty"):
        Adapter.validate_params(SamplingParams(extra_args={"callable": ""}))
