"""The environment that checks run processors in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.check.environment import CheckEnvironment
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import StartError

StringOf = Callable[[type[CustomLogitProcessor]], PickledProcessor]
Rows = list[dict[str, Any]] | None


class OnlyAlone(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        assert len(logits) == 1
        return logits + 1


class Counts(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            state = params["__req__"].state
            state["calls"] = state.get("calls", 0) + 1
            logits[row] = state["calls"] * 100 + len(params["__req__"].output_ids)
        return logits


def test_batch_failure_falls_back_to_row_by_row(environment: CheckEnvironment, string_of: StringOf) -> None:
    with environment.fresh_processor(string_of(OnlyAlone)) as processor:
        sequences = [processor.start_sequence(f"{number}", {}, [1, 2]) for number in range(2)]
        single = processor.call(sequences[:1], torch.zeros(1, 260))
        both = processor.call(sequences, torch.zeros(2, 260))
    assert (single.row_by_row, both.row_by_row) == (False, True)
    assert not both.faults
    assert both.logits.tolist() == torch.ones(2, 260).tolist()


def test_sequence_appends_tokens_and_forks(environment: CheckEnvironment, string_of: StringOf) -> None:
    given = torch.zeros(1, 260)
    with environment.fresh_processor(string_of(Counts)) as processor:
        sequence = processor.start_sequence("one", {}, [1])
        assert processor.call([sequence], given).logits[0, 0] == 100
        sequence.tokens.append(7)
        fork = sequence.fork()
        fork.tokens.append(8)
        assert processor.call([fork], given).logits[0, 0] == 202
        assert processor.call([sequence], given).logits[0, 0] == 201
    assert not given.any()


def test_fresh_processor_has_no_state(environment: CheckEnvironment, string_of: StringOf) -> None:
    for _ in range(2):
        with environment.fresh_processor(string_of(Counts)) as processor:
            assert processor.call([processor.start_sequence("one", {}, [1])], torch.zeros(1, 260)).logits[0, 0] == 100


def test_load_error(environment: CheckEnvironment) -> None:
    with (
        pytest.raises(ProcessorLoadError, match="ZeroDivisionError"),
        environment.fresh_processor(SourceProcessor("1 / 0", "X")),
    ):
        pass


def test_start_error_without_sandboxes(loaded_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, model: object) -> None:
        raise ZygoteError("this kernel cannot lock serialized code in: landlock")

    monkeypatch.setattr(ZygoteProcess, "set_up", refuse)
    with pytest.raises(StartError, match=r"cannot lock serialized code in(.|\n)*--processor-isolation none"):
        CheckEnvironment(ServerConfig(model_path="tiny"), loaded_model, 8)
