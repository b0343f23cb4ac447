"""Core binding, tested in subprocesses: PyTorch's number of threads is fixed when a process starts."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from logitship.server.model.attention import Segment, StepLayout
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import Chunk, ModelRunner
from logitship.server.refusals import UnsupportedModel
from tests.helpers.random_cases import random_seeds

from .conftest import TINY_SIZES

CORES = sorted(os.sched_getaffinity(0))

PROGRAM = """
import json, os, threading
import torch
from logitship.server.model.model_runner import CoreBinding


def cores(): return {task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}

def run():
    if TEAM_EXISTS:
        torch.ones(1 << 20).add_(1)
    before = cores()
    binding = CoreBinding()
    name = open("/proc/thread-self/comm").read().strip()
    with binding:
        within = cores()
    print(json.dumps([before, within, cores(), str(threading.get_native_id()), name]))

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def run(num_threads: int, team_exists: bool = False) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]:
    """Return each thread's cores before, within and after the block, and the id of the thread that made the binding."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("TEAM_EXISTS", str(team_exists))],
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
        capture_output=True,
        check=True,
        text=True,
    )
    before, within, after, own, name = json.loads(done.stdout)
    assert not name.startswith("omp")
    return before, within, after, own


@pytest.mark.thorough
@pytest.mark.skipif(len(CORES) == 1, reason="needs several cores")
def test_each_thread_of_the_team_gets_a_core() -> None:
    before, within, after, own = run(len(CORES))
    workers = set(within) - set(before)
    assert sorted(within[task] for task in {own, *workers}) == [[core] for core in CORES]
    assert all(within[task] == CORES for task in set(before) - {own})
    # Threads started outside the block may use all cores.
    assert after[own] == CORES


@pytest.mark.thorough
@pytest.mark.parametrize(("num_threads", "team_exists"), [(1, False), (len(CORES), True)])
def test_nothing_is_bound(num_threads: int, team_exists: bool) -> None:
    """With one thread, or a team that was started before."""
    for each in run(num_threads, team_exists)[:3]:
        assert all(cores == CORES for cores in each.values())


# Where logits are compared: their magnitude is about 10, of which float32 rounds off 1e-6, and two layers' sums a few
# times that. 1e-4 leaves room for any order of additions. A token that sees a wrong one is off by 0.1 and more.
VOCAB, MAX_LEN = TINY_SIZES["vocab_size"], TINY_SIZES["max_position_embeddings"]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**TINY_SIZES, sliding_window=5)),
    "qwen2, a sliding layer above a full one": lambda: Qwen2ForCausalLM(
        Qwen2Config(**TINY_SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "gemma3, its own scale": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TINY_SIZES, head_dim=8, sliding_window=3)),
    "gpt2, learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LEN, bos_token_id=0, eos_token_id=1
        )
    ),
}


@pytest.fixture(params=["llama", *MODELS])
def model(request: pytest.FixtureRequest, float32_model: LoadedModel) -> PreTrainedModel:
    if request.param == "llama":
        return copy.deepcopy(float32_model.model)
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


@pytest.fixture
def llama_runner(float32_model: LoadedModel) -> ModelRunner:
    return ModelRunner(copy.deepcopy(float32_model.model), num_slots=4, max_len=MAX_LEN)


class Plain:
    """The model as transformers runs it: each sequence alone and from the start."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model)
        self._model.set_attn_implementation("eager")

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


@pytest.mark.slow
@random_seeds(3, shares_fixtures=True)
def test_packed_steps_match_the_plain_model(seed: int, num_calls: int, model: PreTrainedModel) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plain = Plain(model)
    runner = ModelRunner(copy.deepcopy(model), num_slots=5, max_len=MAX_LEN)
    for layer in (*runner.cache.keys, *runner.cache.values):
        layer.normal_()  # values of earlier sequences must not matter
    sequences: dict[int, list[int]] = {}
    expected_of: dict[int, torch.Tensor] = {}
    computed: dict[int, int] = {}
    calls: set[int] = set()
    for step in range(1000):
        if step >= 25 and num_calls in calls:  # nearly always after 25
            break
        for slot in range(5):
            if slot in sequences and (computed[slot] == MAX_LEN or rng.random() < 0.1):
                del sequences[slot], computed[slot]
            elif slot not in sequences and rng.random() < 0.4:
                sequences[slot] = [rng.randrange(VOCAB) for _ in range(MAX_LEN)]
                expected_of[slot] = plain.logits(sequences[slot])
                computed[slot] = 0
        # A sequence decodes (a token and its draft), computes a chunk of its prompt, or waits.
        decoding = [slot for slot in sequences if computed[slot] > 0 and rng.random() < 0.6]
        prompted = [slot for slot in sequences if slot not in decoding and rng.random() < 0.6]
        rng.shuffle(decoding)
        rng.shuffle(prompted)
        lengths = {slot: rng.choice([1, 1, 2, 4]) for slot in decoding}
        lengths |= {slot: rng.randint(1, 9) for slot in prompted}
        chunks = {
            slot: Chunk(slot, computed[slot], sequences[slot][computed[slot] : computed[slot] + lengths[slot]])
            for slot in [*decoding, *prompted]
        }
        if not chunks:
            continue
        expected = torch.cat(
            [expected_of[slot][chunk.start : chunk.start + len(chunk.token_ids)] for slot, chunk in chunks.items()]
        )
        keep = rng.choices(range(len(expected)), k=rng.randint(0, 6))
        if decoding:
            segments = [Segment(slot, computed[slot], len(chunks[slot].token_ids)) for slot in decoding]
            calls.add(len(StepLayout(segments, [], runner.cache, runner.dtype, runner.device).batches))
        got = runner.logits([chunks[s] for s in decoding], [chunks[s] for s in prompted], keep)
        assert got.shape == (len(keep), expected.shape[1])
        torch.testing.assert_close(got, expected[keep], rtol=1e-4, atol=1e-4)
        for slot, chunk in chunks.items():
            computed[slot] += len(chunk.token_ids)
    assert num_calls in calls


def test_other_sequences_do_not_change_the_logits(llama_runner: ModelRunner) -> None:
    """Compare the same sequence alone and with another one in a lower slot."""
    prompt = [5, 9, 33, 7]
    llama_runner.logits([], [Chunk(2, 0, prompt)], [])
    alone = llama_runner.logits([Chunk(2, 4, [8])], [], [0])
    batched = llama_runner.logits([Chunk(2, 4, [8])], [Chunk(0, 0, [1, 2, 3])], [0])
    torch.testing.assert_close(batched, alone, rtol=1e-4, atol=1e-4)


def test_nan_in_one_slot_does_not_spread(llama_runner: ModelRunner) -> None:
    llama_runner.logits([], [Chunk(0, 0, [5, 6, 7]), Chunk(1, 0, [8, 9])], [])
    expected = llama_runner.logits([Chunk(1, 2, [4])], [], [0])
    llama_runner.cache.keys[0][0, :, :3] = float("nan")
    got = llama_runner.logits([Chunk(0, 3, [4]), Chunk(1, 2, [4])], [], [0, 1])
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1:], expected, rtol=1e-4, atol=1e-4)


def test_logits_are_always_float32(float32_model: LoadedModel) -> None:
    runner = ModelRunner(copy.deepcopy(float32_model.model).to(torch.bfloat16), num_slots=1, max_len=8)
    assert runner.cache.keys[0].dtype == torch.bfloat16
    assert runner.logits([], [Chunk(0, 0, [5, 6])], [1]).dtype == torch.float32


def gemma2() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**TINY_SIZES, head_dim=8))


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, bos_token_id=0, eos_token_id=1)
    )


def falcon() -> PreTrainedModel:
    return FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def gpt_oss() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return GptOssForCausalLM(
        GptOssConfig(**TINY_SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, rope_parameters=rope)
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (gemma2, "Gemma2ForCausalLM cannot be served: it has softcapped attention"),
        (mamba, "MambaForCausalLM cannot be served: it has layers of type linear_attention"),
        (falcon, "FalconForCausalLM cannot be served: it has no support for exchangeable attention functions"),
        (gpt_oss, r"GptOssForCausalLM cannot be served: its first token failed: attention sinks \(s_aux\)"),
    ],
)
def test_unsupported_models_are_refused_by_name(build: Callable[[], PreTrainedModel], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{reason}$"):
        ModelRunner(build().eval(), num_slots=1, max_len=8)


def test_model_that_ignores_logits_to_keep_is_refused(
    float32_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(float32_model.model)
    forward = model.forward

    def ignore_keep(*args: Any, logits_to_keep: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", ignore_keep)
    with pytest.raises(UnsupportedModel, match="logits of other tokens than those selected"):
        ModelRunner(model, num_slots=1, max_len=8)
