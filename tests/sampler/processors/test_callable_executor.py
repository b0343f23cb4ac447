from __future__ import annotations

from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.processors.callable_executor import CallableExecutor
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from tests.sampler.conftest import Load, NewRequest

MODEL = ModelView(4, frozenset({1}), None)


@pytest.fixture
def executor() -> CallableExecutor:
    return CallableExecutor()


def loaded(executor: CallableExecutor, function: Any, name: str = "callable") -> LoadedProcessor:
    """Create a processor. All have the same digest, as the sequences of one request."""
    return LoadedProcessor(f"sha256:{name}", name, executor, function, per_sequence=True)


class Batch:
    """Runs requests with shipped processors step by step."""

    def __init__(self, *requests: Any) -> None:
        self.rows: PersistentBatch[Any] = PersistentBatch(8)
        self.shipped = ShippedProcessors(None, torch.device("cpu"), False, model=MODEL)
        for request in requests:
            self.rows.add(request)

    def step(self) -> tuple[list[list[float]], dict[int, ProcessorFault]]:
        self.shipped.update_state(self.rows.commit())
        logits = self.shipped.apply(torch.zeros(len(self.rows), 4))
        return logits.tolist(), dict(self.shipped.take_faults())


def count(past: list[int], row: torch.Tensor) -> torch.Tensor:
    return row + len(past)


def recall(prompt: list[int], past: list[int], row: torch.Tensor) -> torch.Tensor:
    row[: len(prompt) + len(past)] = torch.tensor([*prompt, *past], dtype=torch.float32)
    return row


def recall_ids(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, : input_ids.shape[1]] = input_ids.float()
    return scores


def test_each_sequence_has_its_own_callable_and_tokens(executor: CallableExecutor, shipping: NewRequest) -> None:
    """Sequences with the same digest are not a group, because each callable has its own state."""
    functions = (count, recall, recall_ids)
    requests = [
        shipping(str(number), (loaded(executor, function), {}), prompt=[number + 5])
        for number, function in enumerate(functions)
    ]
    batch = Batch(*requests)
    assert batch.step()[0] == [[0.0] * 4, [6.0, 0.0, 0.0, 0.0], [7.0, 0.0, 0.0, 0.0]]
    for request in requests:
        request.output_token_ids.append(9)
    assert batch.step()[0] == [[1.0] * 4, [6.0, 9.0, 0.0, 0.0], [7.0, 9.0, 0.0, 0.0]]
    batch.rows.remove(requests[0])
    requests[2].output_token_ids.append(3)
    assert batch.step()[0] == [[7.0, 9.0, 3.0, 0.0], [6.0, 9.0, 0.0, 0.0]]
    assert requests[2].sampling_params.processors[0].count.steps == 3


def test_callables_run_in_list_order(executor: CallableExecutor, shipping: NewRequest, load: Load) -> None:
    def double(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        return logits * 2

    def add_three(past: list[int], row: torch.Tensor) -> torch.Tensor:
        return row + 3

    uses = (
        (loaded(executor, add_three, "three"), {}),
        (load(double, "Double"), {}),
        (loaded(executor, add_three, "again"), {}),
    )
    assert Batch(shipping("a", *uses)).step()[0] == [[9.0] * 4]


def test_convention_is_determined_once(executor: CallableExecutor, shipping: NewRequest) -> None:
    class Asked:
        signatures = 0

        def __call__(self, past: list[int], row: torch.Tensor) -> torch.Tensor:
            return row

        @property
        def __signature__(self) -> None:
            Asked.signatures += 1

    batch = Batch(shipping("a", (loaded(executor, Asked()), {})))
    batch.step()
    asked = Asked.signatures
    batch.step()
    assert asked == Asked.signatures > 0


def raising(past: list[int], row: torch.Tensor) -> torch.Tensor:
    row.fill_(float("nan"))
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (raising, "exception", "processor Broken raised ValueError: broken"),
        (lambda past, row: row[:2], "bad_result", "processor Broken returned shape [2], expected [4]"),
        (lambda past, row: None, "bad_result", "processor Broken returned NoneType, not a tensor"),
        (lambda past, row: row / 0, "non_finite", "processor Broken returned NaN"),
        (lambda row: row, "exception", "processor Broken raised TypeError: <lambda> takes (row): expected"),
    ],
)
def test_fault_affects_only_its_sequence(
    function: Any, kind: str, message: str, executor: CallableExecutor, shipping: NewRequest
) -> None:
    broken = loaded(executor, function, "Broken")
    healthy = [shipping(name, (loaded(executor, lambda past, row: row + 1), {})) for name in "ac"]
    logits, faults = Batch(healthy[0], shipping("b", (broken, {})), healthy[1]).step()
    assert logits == [[1.0] * 4, [0.0] * 4, [1.0] * 4]
    assert list(faults) == [1]
    assert (faults[1].kind, faults[1].name, faults[1].digest) == (kind, "Broken", broken.digest)
    assert faults[1].message.startswith(message)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop"), MemoryError("no more")])
def test_any_exception_becomes_a_fault(error: BaseException, executor: CallableExecutor, shipping: NewRequest) -> None:
    def end(past: list[int], row: torch.Tensor) -> torch.Tensor:
        raise error

    _, faults = Batch(shipping("a", (loaded(executor, end, "End"), {}))).step()
    assert faults[0].message == f"processor End raised {type(error).__name__}: {error}"
    assert ", in end\n" in faults[0].traceback
    assert "callable_executor.py" not in faults[0].traceback.replace("test_callable_executor.py", "")


def test_load_from_string_is_rejected(executor: CallableExecutor) -> None:
    with pytest.raises(AssertionError, match="not loaded from a processor string"):
        executor.load(InstalledProcessor("min_p"))
