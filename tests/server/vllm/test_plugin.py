"""The plugin's class, with fakes of the names that it imports from vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

VOCAB_SIZE = 64


class LogitsProcessor:
    """Fake of vLLM's base class."""


class Group:
    """Fake of vLLM's group of tensor-parallel ranks, on one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group = rank
        self.world_size = size
        self.ranks = range(size)

    def broadcast(self, rows: torch.Tensor, src: int) -> torch.Tensor:
        assert src == 0
        return rows if self.rank_in_group == 0 else torch.full_like(rows, 5.0)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported with a fake vLLM of one rank."""
    interface = ModuleType("vllm.v1.sample.logits_processor")
    interface.LogitsProcessor = LogitsProcessor  # type: ignore[attr-defined]
    interface.BatchUpdate = object  # type: ignore[attr-defined]
    distributed = ModuleType("vllm.distributed")
    distributed.get_tp_group = lambda: Group(0, 1)  # type: ignore[attr-defined]
    distributed.get_pp_group = lambda: SimpleNamespace(is_last_rank=True)  # type: ignore[attr-defined]
    input_batch = ModuleType("vllm.v1.worker.gpu_input_batch")
    input_batch.InputBatch = InputBatch  # type: ignore[attr-defined]
    input_batch.CachedRequestState = CachedRequestState  # type: ignore[attr-defined]
    outputs = ModuleType("vllm.v1.outputs")
    outputs.ModelRunnerOutput = ModelRunnerOutput  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (interface, distributed, input_batch, outputs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    modules = [f"logitship.server.vllm.{name}" for name in ("plugin", "tensor_parallel")]
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(modules[0])
    for name in modules:
        sys.modules.pop(name, None)


class InputBatch:
    """Fake of vLLM's persistent batch."""

    def __init__(self) -> None:
        self._req_ids: list[str] = []
        self.req_output_token_ids: list[list[int]] = []

    @property
    def req_ids(self) -> list[str]:
        return self._req_ids


@dataclass
class ModelRunnerOutput:
    """Fake of what a model runner returns."""

    prompt_token_id_logprobs_dict: dict[str, torch.Tensor] = field(default_factory=dict)


class CachedRequestState:
    """Fake of vLLM's record of a request."""

    req_id = ""
    num_computed_tokens = 0
    num_tokens = 0


class WorkerBase:
    """Fake of vLLM's class of this name, whose methods front ends call."""


class GPUModelRunner(WorkerBase):
    """Fake of vLLM's class of this name, which makes the plugin and holds it. It is its own worker."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = InputBatch()
        self.discard_request_mask = None
        self.sampler = SimpleNamespace(
            apply_logits_processors=lambda logits, *_: logits,
            topk_topp_sampler=SimpleNamespace(forward=lambda logits, *_: (logits.argmax(-1), None)),
        )

    def sample_tokens(self, grammar_output: Any) -> None:
        """Sample nothing."""

    def make(self, plugin: ModuleType, **settings: Any) -> Any:
        model_config = SimpleNamespace(
            skip_tokenizer_init=True,
            max_model_len=64,
            get_vocab_size=lambda: VOCAB_SIZE,
            try_get_generation_config=dict,
            logits_processors=settings.get("logits_processors", ["logitship.server.vllm:LogitshipLogitsProcessor"]),
        )
        scheduler_config = SimpleNamespace(max_num_seqs=4, async_scheduling=settings.get("async_scheduling", True))
        encoders = settings.get("ec_transfer_config")
        config = SimpleNamespace(
            model_config=model_config,
            scheduler_config=scheduler_config,
            parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
            ec_transfer_config=encoders,
        )
        return plugin.LogitshipLogitsProcessor(config, torch.device("cpu"), False)


def test_public_import_path(plugin: ModuleType) -> None:
    package = importlib.import_module("logitship.server.vllm")
    assert package.LogitshipLogitsProcessor.__name__ == "LogitshipLogitsProcessor"
    assert not hasattr(package, "Nothing")


def test_logits_are_unchanged_without_requests(plugin: ModuleType) -> None:
    runner = GPUModelRunner()
    processor = runner.make(plugin)
    assert not processor.is_argmax_invariant()
    processor.update_state(None)
    logits = torch.randn(3, VOCAB_SIZE)
    before = logits.clone()
    assert processor.apply(logits) is logits
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("settings", "begins_early"),
    [
        ({"async_scheduling": False}, True),
        ({"async_scheduling": True}, False),
        ({"async_scheduling": False, "ec_transfer_config": SimpleNamespace(is_encode_only=False)}, True),
        ({"async_scheduling": False, "ec_transfer_config": SimpleNamespace(is_encode_only=True)}, False),
    ],
)
def test_calls_begin_early_if_their_histories_are_known(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], begins_early: bool
) -> None:
    events: list[Any] = []
    update = SimpleNamespace(added=[])
    monkeypatch.setattr(plugin.BatchSeat, "update_state", lambda self, update: events.append(update))
    monkeypatch.setattr(plugin.BatchSeat, "begin", lambda self: events.append("begin"))
    GPUModelRunner().make(plugin, **settings).update_state(update)
    assert events == [update, "begin"][: 1 + begins_early]


def test_unnamed_plugin_with_async_scheduling_is_refused_at_start(plugin: ModuleType) -> None:
    """Sampled tokens are filled in for named plugins, not for those found through an entry point."""
    with pytest.raises(ValueError, match="named with --logits-processors"):
        GPUModelRunner().make(plugin, logits_processors=None)
    GPUModelRunner().make(plugin, logits_processors=None, async_scheduling=False)


def test_unknown_model_runner_is_refused_at_start(plugin: ModuleType) -> None:
    class TPUModelRunner(GPUModelRunner):
        pass

    TPUModelRunner().make(plugin)  # a subclass
    other = type("Other", (), {"make": GPUModelRunner.make})
    with pytest.raises(ValueError, match=r"the model runner of this vLLM: .* 0\.32, with GPUModelRunner"):
        other().make(plugin)


def test_changed_model_runner_is_refused_at_start(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is made while the constructor runs: attributes set later are found in the code of the class."""

    def other_names(self: Any) -> None:
        self.states: dict[str, Any] = {}
        self.input_batch = InputBatch()
        self.plugin = GPUModelRunner.make(self, plugin)

    def other_batch(self: InputBatch) -> None:
        self.output_token_ids: list[list[int]] = []

    monkeypatch.setattr(InputBatch, "__init__", other_batch)
    monkeypatch.setattr(GPUModelRunner, "__init__", other_names)
    missing = "GPUModelRunner.requests, GPUModelRunner.discard_request_mask, InputBatch.req_output_token_ids"
    with pytest.raises(ValueError, match=missing):
        GPUModelRunner()


def test_unknown_worker_is_refused_at_start(plugin: ModuleType) -> None:
    other: Any = type("GPUModelRunner", (), {**vars(GPUModelRunner)})
    with pytest.raises(ValueError, match="does not know the worker of this vLLM"):
        other().make(plugin)


def test_worker_answers_front_ends(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.BatchSeat, "must_wait", lambda self, extra_args, names: extra_args["answer"])
    runner: Any = GPUModelRunner()
    runner.make(plugin)
    assert [runner.logitship_must_wait({"answer": each}, []) for each in (True, False)] == [True, False]


def test_vllm_without_the_field_for_faults_is_refused_at_start(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunnerOutput, "__dataclass_fields__", {})
    with pytest.raises(ValueError, match=r"with ModelRunnerOutput\.prompt_token_id_logprobs_dict"):
        GPUModelRunner().make(plugin)


def test_tensor_parallel_ranks(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_of = sys.modules["logitship.server.vllm.tensor_parallel"]
    results = []
    checked: list[list[int]] = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks_of, "get_tp_group", lambda rank=rank: Group(rank, 2))
        monkeypatch.setattr(ranks_of, "check_default_group", lambda ranks, engine: checked.append([*ranks]))
        ranks = ranks_of.TensorParallelRanks()
        assert ranks.is_first == (rank == 0)
        logits = torch.zeros(3, 2)
        ranks.broadcast(logits, [0, 2])
        results.append(logits.tolist())
    assert results == [[[0.0, 0.0]] * 3, [[5.0, 5.0], [0.0, 0.0], [5.0, 5.0]]]
    assert checked == [[0, 1]] * 2
    monkeypatch.setattr(ranks_of, "get_pp_group", lambda: SimpleNamespace(is_last_rank=False))
    monkeypatch.setattr(ranks_of, "get_tp_group", lambda: Group(0, 1))
    assert not ranks_of.TensorParallelRanks().is_first  # ranks of earlier stages do not sample
