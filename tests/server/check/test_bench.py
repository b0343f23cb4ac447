"""The stages that processors are tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.check.bench import Bench
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


def test_a_call_that_was_made_row_by_row_says_so(bench: Bench, string_of: StringOf) -> None:
    with bench.stage(string_of(OnlyAlone)) as stage:
        players = [stage.enter(f"{number}", {}, [1, 2]) for number in range(2)]
        alone = stage.call(players[:1], torch.zeros(1, 260))
        both = stage.call(players, torch.zeros(2, 260))
    assert (alone.row_by_row, both.row_by_row) == (False, True)
    assert not both.faults
    assert both.logits.tolist() == torch.ones(2, 260).tolist()


def test_a_sequence_takes_tokens_and_forks(bench: Bench, string_of: StringOf) -> None:
    given = torch.zeros(1, 260)
    with bench.stage(string_of(Counts)) as stage:
        player = stage.enter("one", {}, [1])
        assert stage.call([player], given).logits[0, 0] == 100
        player.tokens.append(7)
        twin = player.fork()
        twin.tokens.append(8)
        assert stage.call([twin], given).logits[0, 0] == 202
        assert stage.call([player], given).logits[0, 0] == 201
    assert not given.any()


def test_each_stage_is_new(bench: Bench, string_of: StringOf) -> None:
    for _ in range(2):
        with bench.stage(string_of(Counts)) as stage:
            assert stage.call([stage.enter("one", {}, [1])], torch.zeros(1, 260)).logits[0, 0] == 100


def test_what_does_not_load(bench: Bench) -> None:
    with pytest.raises(ProcessorLoadError, match="ZeroDivisionError"), bench.stage(SourceProcessor("1 / 0", "X")):
        pass


def test_a_machine_without_sandboxes(loaded_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, model: object) -> None:
        raise ZygoteError("this kernel cannot sandbox shipped code: landlock")

    monkeypatch.setattr(ZygoteProcess, "set_up", refuse)
    with pytest.raises(StartError, match=r"cannot sandbox shipped code(.|\n)*--processor-isolation none"):
        Bench(ServerConfig(model_path="tiny"), loaded_model, 8)
