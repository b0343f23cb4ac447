"""Records of fakes of both of vLLM's samplers: what was sampled, from which tokens, and what moved their logits."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import logitship
from logitship.server.vllm.sampling_recorder import BatchRecorder, SlotRecorder
from tests.helpers.random_cases import random_seeds

from .fake_vllm import fake_params

VOCAB = 50
PROMPT, OUTPUT = [3, 4, 5], [6, 7]
ASKED = {"return_sampling_mask": True, "sampling_mask_format": "packed", "return_sampling_edits": True}
PLAIN = fake_params()


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Fake of vLLM's function, with top-k alone. It changes its argument."""
    assert k is not None
    for row, count in zip(logits, k.tolist(), strict=True):
        row[row < row.topk(count).values[-1]] = -torch.inf
    return logits


@pytest.fixture(autouse=True)
def vllm_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.v1.sample.ops.topk_topp_sampler")
    vars(module)["apply_top_k_top_p"] = top_k_top_p
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def penalize(logits: torch.Tensor, rows: dict[int, Any]) -> None:
    """Do what vLLM does for the parameters of requests that are recorded."""
    for row, params in rows.items():
        seen = sorted({*PROMPT, *OUTPUT})
        values = logits[row, seen]
        factor = params.repetition_penalty
        logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
        logits[row, OUTPUT] -= params.frequency_penalty + params.presence_penalty


def bias(logits: torch.Tensor, rows: dict[int, Any]) -> None:
    for row, params in rows.items():
        for token, value in (params.logit_bias or {}).items():
            logits[row, token] += value


class Runner(SimpleNamespace):
    """Fake of vLLM's `GPUModelRunner`."""


class Model:
    """The rows of a step, in which only some requests are recorded.

    Attributes:
        rows: parameters of the recorded requests, by row.
        logits: the model's logits.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rows = {row: random_params(rng) for row in rng.sample(range(5), 3)}
        self.logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(rng.randrange(1000)))
        self.edit: Callable[[torch.Tensor], Any] = rng.choice(
            [
                lambda row: row.mul_(1.5),
                lambda row: row[:10].add_(0.7),
                lambda row: row[5:9].fill_(-torch.inf),
                lambda row: row.copy_(row.log_softmax(-1)),
            ]
        )

    def run_processors(self, recorder: Any, logits: torch.Tensor) -> None:
        recorder.record_stage(logits)
        for row in self.rows:
            self.edit(logits[row])
        recorder.record_stage(logits)

    def temperatures(self) -> torch.Tensor:
        return torch.tensor([[self.rows[row].temperature or 1.0 if row in self.rows else 1.0] for row in range(5)])

    def top_k(self) -> torch.Tensor:
        return torch.tensor([self.rows[row].top_k if row in self.rows else VOCAB for row in range(5)])

    def check(self, records: dict[str, Any], tokens: list[int], sampled_from: torch.Tensor) -> None:
        """Compare each record with the logits that its token was sampled from, and with a replay of the model's own."""
        assert sorted(records) == sorted(f"request {row}" for row in self.rows)
        for row, params in self.rows.items():
            record = records[f"request {row}"].record(tokens[row])
            expected = sampled_from[row].log_softmax(-1)[tokens[row]] if params.temperature else torch.tensor(0.0)
            assert record.logprobs[0] == pytest.approx(expected.item(), abs=1e-6)
            kept = sampled_from[row].isfinite().numpy() if params.temperature else np.arange(VOCAB) == tokens[row]
            np.testing.assert_array_equal(record.could_be_sampled()[0], kept)
            replayed = logitship.replay.replay(self.logits[row][None], record)
            assert replayed.item() == pytest.approx(expected.item(), abs=1e-5)


def random_params(rng: random.Random) -> Any:
    return fake_params(
        dict(ASKED),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_k=rng.choice([2, 10]),
        logit_bias=rng.choice([None, {4: 1.5, 30: -2.0}]),
        repetition_penalty=rng.choice([1.0, 1.4]),
        frequency_penalty=rng.choice([0.0, 0.5]),
    )


@random_seeds(40)
def test_records_of_the_batch(seed: int) -> None:
    model = Model(random.Random(seed))
    sampled_from = torch.empty(0)

    def apply_logits_processors(logits: torch.Tensor, metadata: None, predict_bonus_token: bool) -> torch.Tensor:
        bias(logits, model.rows)
        model.run_processors(recorder, logits)
        penalize(logits, model.rows)
        return logits

    def forward_native(logits: torch.Tensor, generators: dict[int, Any], k: Any, p: Any) -> tuple[torch.Tensor, None]:
        nonlocal sampled_from
        sampled_from = top_k_top_p(logits, k, p)
        return sampled_from.argmax(-1), None

    sampler = SimpleNamespace(
        apply_logits_processors=apply_logits_processors, topk_topp_sampler=SimpleNamespace(forward=forward_native)
    )
    request = SimpleNamespace(prompt_token_ids=PROMPT, output_token_ids=OUTPUT)
    ids = [f"request {row}" for row in range(5)]
    runner = Runner(sampler=sampler, input_batch=SimpleNamespace(req_ids=ids), requests=dict.fromkeys(ids, request))
    recorder = BatchRecorder(runner)
    recorder.update_state(
        SimpleNamespace(batch_size=5, removed=[], moved=[], added=[(row, p, [], []) for row, p in model.rows.items()])
    )
    logits = sampler.apply_logits_processors(model.logits.clone(), None, False)
    tokens, _ = sampler.topk_topp_sampler.forward(logits.div_(model.temperatures()), {}, model.top_k(), None)
    model.check(dict(recorder.take()), tokens.tolist(), sampled_from)
    assert recorder.take() == {}
    # The requests end: their rows are others'.
    recorder.update_state(SimpleNamespace(batch_size=0, removed=[*model.rows], moved=[], added=[]))
    sampler.apply_logits_processors(model.logits.clone(), None, False)
    assert recorder.take() == {}


@random_seeds(40)
def test_records_of_slots(seed: int) -> None:
    model = Model(random.Random(seed))

    class Sampler:
        use_flashinfer = True

        def sample(
            self, logits: torch.Tensor, rows: Any, slots: Any, slots_np: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert not self.use_flashinfer or not model.rows
            logits = logits.clone()
            bias(logits, model.rows)
            penalize(logits, model.rows)
            model.run_processors(recorder, logits)
            kept = top_k_top_p(logits.div_(model.temperatures()), model.top_k(), None)
            return kept.argmax(-1), kept

    slots = np.arange(5)[::-1]
    seen = torch.tensor([*PROMPT, *OUTPUT, 0]).repeat(5, 1)
    states = SimpleNamespace(
        index_to_req_id={4 - row: f"request {row}" for row in range(5)},
        total_len=SimpleNamespace(gpu=torch.full((5,), 5)),
        all_token_ids=SimpleNamespace(gpu=seen),
    )
    runner = Runner(sampler=Sampler(), req_states=states)
    recorder = SlotRecorder(runner)
    assert [recorder.add_request(4 - row, model.rows.get(row, PLAIN)) for row in range(5)] == [
        row in model.rows for row in range(5)
    ]
    tokens, sampled_from = runner.sampler.sample(model.logits, None, None, slots)
    assert runner.sampler.use_flashinfer
    model.check(dict(recorder.take()), tokens.tolist(), sampled_from)
    # Other requests get the slots.
    model.rows.clear()
    assert not any(recorder.add_request(slot, PLAIN) for slot in range(5))
    runner.sampler.sample(model.logits, None, None, slots)
    assert recorder.take() == {}


def batch_recorder(forward: Callable[..., Any], ids: list[str]) -> tuple[Any, BatchRecorder]:
    """Return a fake sampler of V1 with a recorder, for one request that asks for its record."""
    sampler = SimpleNamespace(
        apply_logits_processors=lambda logits, *_: logits,
        topk_topp_sampler=SimpleNamespace(forward=forward, forward_native=lambda *_: "exact"),
    )
    runner = Runner(sampler=sampler, input_batch=SimpleNamespace(req_ids=ids), requests={})
    recorder = BatchRecorder(runner)
    params = fake_params(dict(ASKED), temperature=1.0, top_k=2)
    recorder.update_state(SimpleNamespace(batch_size=1, removed=[], moved=[], added=[(0, params, [], [])]))
    sampler.runner = runner  # the recorder holds it weakly
    return sampler, recorder


def test_recorded_rows_are_not_sampled_by_a_fused_kernel() -> None:
    """It may sample a token that is not among those that are recorded."""

    def forward_cuda(*arguments: Any) -> str:
        return "fused"

    sampler, recorder = batch_recorder(forward_cuda, ["request 0"])
    logits = torch.randn(1, VOCAB)
    for is_recorded in (True, False):
        sampler.apply_logits_processors(logits.clone(), None, False)
        sampled = sampler.topk_topp_sampler.forward(logits.clone(), {}, torch.tensor([2]), None)
        assert sampled == ("exact" if is_recorded else "fused")
        assert list(recorder.take()) == ["request 0"] * is_recorded
        recorder.update_state(SimpleNamespace(batch_size=0, removed=[0], moved=[], added=[]))


def test_errors_leave_the_engine_running() -> None:
    """The request ends in the front end, because its token has no record."""
    sampler, recorder = batch_recorder(lambda logits, *_: logits, [])
    sampler.topk_topp_sampler.forward.__wrapped__.__name__ = "forward_native"
    logits = torch.randn(1, VOCAB)
    sampler.apply_logits_processors(logits.clone(), None, False)
    sampler.topk_topp_sampler.forward(logits.clone(), {}, None, None)  # top_k is expected
    assert recorder.take() == {}
    sampler.apply_logits_processors(logits.clone(), None, False)
    assert recorder.take() == {}  # the row has no request
    sampler.apply_logits_processors(logits.clone(), None, False)
    recorder.record_stage(torch.empty(0, VOCAB))
    assert recorder.take() == {}
