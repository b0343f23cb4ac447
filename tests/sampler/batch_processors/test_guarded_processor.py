from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.guarded_processor import BatchProcessorFault, GuardedProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.sampling_params import SamplingParams

VOCAB = 4


class Plugin(LogitsProcessor):
    """Adds the number of output tokens to a column. Fails halfway if a request asks for it."""

    def __init__(self) -> None:
        self.rows: BatchRows[tuple[dict[str, Any], list[int]]] = BatchRows(
            lambda params, prompt, output: (dict(params.extra_args or {}), output)
        )

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.rows.update(batch_update)
        for args, output in self.rows.values():
            if args.get("fail") == "update" or (args.get("fail") == "later" and len(output) > 1):
                raise KeyError("target")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (args, output) in self.rows.items():
            logits[row] += 100
            logits[row, args.get("column", 0)] += len(output)
        return logits[:1] if any(args.get("fail") == "shape" for args, _ in self.rows.values()) else logits


def params(**args: Any) -> SamplingParams:
    return SamplingParams(extra_args=args)


def expected(outputs: int, column: int = 0) -> list[float]:
    return [100.0 + (outputs if position == column else 0) for position in range(VOCAB)]


def added(*requests: SamplingParams) -> BatchUpdate:
    return BatchUpdate(len(requests), [], [(row, each, [], [7]) for row, each in enumerate(requests)], [])


@pytest.mark.parametrize("failure", [{"fail": "update"}, {"column": 99}, {"fail": "shape"}])
def test_only_failing_request_is_at_fault(failure: dict[str, Any]) -> None:
    guarded = GuardedProcessor(Plugin(), "shift")
    guarded.update_state(added(params(), params(**failure), params(column=2)))
    logits = guarded.apply(torch.zeros(3, VOCAB))
    assert logits.tolist() == [expected(1), [0.0] * VOCAB, expected(1, 2)]
    ((row, fault),) = guarded.take_faults()
    assert row == 1
    assert isinstance(fault, BatchProcessorFault)
    assert "the installed logits processor shift failed on this request" in str(fault)
    assert guarded.take_faults() == []


def test_request_may_start_to_fail_later() -> None:
    outputs: list[list[int]] = [[], []]
    guarded = GuardedProcessor(Plugin(), "shift")
    both = [(0, params(), [], outputs[0]), (1, params(fail="later"), [], outputs[1])]
    guarded.update_state(BatchUpdate(2, [], both, []))
    assert guarded.apply(torch.zeros(2, VOCAB)).tolist() == [expected(0), expected(0)]
    for output in outputs:
        output += [5, 6]
    guarded.update_state(None)
    assert guarded.apply(torch.zeros(2, VOCAB)).tolist() == [expected(2), [0.0] * VOCAB]
    assert [row for row, _ in guarded.take_faults()] == [1]
    guarded.update_state(BatchUpdate(1, [1], [], []))
    assert guarded.apply(torch.zeros(1, VOCAB)).tolist() == [expected(2)]
    assert guarded.take_faults() == []


def test_failure_in_an_update_without_changes() -> None:
    class ReadsNewTokens(Plugin):
        """Reads the last tokens, if no request was added or removed."""

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            self.rows.update(batch_update)
            for args, output in self.rows.values() if batch_update is None else ():
                args["column"] = {0: 1, 5: 2}[output[-1]]

    outputs = [[5], [5]]
    guarded = GuardedProcessor(ReadsNewTokens(), "reads")
    guarded.update_state(BatchUpdate(2, [], [(row, params(), [], output) for row, output in enumerate(outputs)], []))
    outputs[0].append(0)
    outputs[1].append(6)
    guarded.update_state(None)
    assert guarded.apply(torch.zeros(2, VOCAB)).tolist() == [expected(2, 1), [0.0] * VOCAB]
    assert [row for row, _ in guarded.take_faults()] == [1]


def test_error_without_culprit_is_raised() -> None:
    class Broken(Plugin):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            if len(self.rows) > 1:
                raise RuntimeError("only one at a time")
            return logits

    guarded = GuardedProcessor(Broken(), "broken")
    guarded.update_state(added(params(), params()))
    with pytest.raises(RuntimeError, match="only one at a time"):
        guarded.apply(torch.zeros(2, VOCAB))


def test_result_is_cast_like_in_vllm() -> None:
    class Doubled(Plugin):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.double() * 2

    guarded = GuardedProcessor(Doubled(), "doubled")
    guarded.update_state(added(params()))
    result = guarded.apply(torch.ones(1, VOCAB))
    assert result.tolist() == [[2.0] * VOCAB]
    assert result.dtype is torch.float32


def test_moves_after_a_failure() -> None:
    guarded = GuardedProcessor(Plugin(), "shift")
    guarded.update_state(added(params(), params(fail="update"), params(column=3)))
    assert [row for row, _ in guarded.take_faults()] == [1]
    # The request at fault is removed; the last one moves to its row and is swapped with the first.
    moves = [(2, 1, MoveDirectionality.UNIDIRECTIONAL), (0, 1, MoveDirectionality.SWAP)]
    guarded.update_state(BatchUpdate(2, [], [], moves))
    assert guarded.apply(torch.zeros(2, VOCAB)).tolist() == [expected(1, 3), expected(1)]


def test_other_rows_are_unaffected(new_request: Callable[..., Any]) -> None:
    rng = random.Random(5)
    batch: PersistentBatch[Any] = PersistentBatch(8)
    guarded = GuardedProcessor(Plugin(), "shift")
    num_faults = 0
    for step in range(600):
        for member in batch.members:
            if rng.random() < 0.2:
                batch.remove(member)
        while len(batch) < 8 and rng.random() < 0.6:
            failure = rng.choice([{}, {}, {}, {"fail": "update"}, {"fail": "later"}, {"column": 50}, {"fail": "shape"}])
            batch.add(new_request(f"r{step}", params(**({"column": rng.randrange(VOCAB)} | failure)), [1], [2]))
        batch.condense()
        if len(batch) > 1 and rng.random() < 0.3:
            batch.swap(*rng.sample(range(len(batch)), 2))
        guarded.update_state(batch.commit())
        logits = guarded.apply(torch.zeros(len(batch), VOCAB))
        faults = dict(guarded.take_faults())
        for row, member in enumerate(batch.members):
            args, output = member.sampling_params.extra_args, member.output_token_ids
            fails = args.get("fail") in ("update", "shape") or args["column"] >= VOCAB
            fails |= args.get("fail") == "later" and len(output) > 1
            assert (row in faults) == fails
            assert fails or logits[row].tolist() == expected(len(output), args["column"])
        num_faults += len(faults)
        for row, member in enumerate(batch.members):
            if row in faults:
                batch.remove(member)
            else:
                member.output_token_ids.append(3)
    assert num_faults > 100
