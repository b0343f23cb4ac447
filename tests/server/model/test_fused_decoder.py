from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from logitship.server.model.fused_decoder import FusedDecoder, can_fuse
from logitship.server.model.model_runner import Chunk, ModelRunner

from .conftest import TINY_SIZES

VOCAB, MAX_LEN = TINY_SIZES["vocab_size"], TINY_SIZES["max_position_embeddings"]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY_SIZES, tie_word_embeddings=True)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**TINY_SIZES, attention_bias=True, mlp_bias=True)),
    "llama 3 positions": lambda: LlamaForCausalLM(
        LlamaConfig(
            **TINY_SIZES,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        )
    ),
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**TINY_SIZES, sliding_window=5)),
    "qwen2, a sliding layer above a full one": lambda: Qwen2ForCausalLM(
        Qwen2Config(**TINY_SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen3, norms of heads": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY_SIZES, head_dim=8)),
}


@pytest.fixture(params=[*MODELS])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make(request.param)


def make(name: str) -> PreTrainedModel:
    """Return a model with random norms and biases, which are constant in a new one."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return model


@pytest.mark.usefixtures("num_calls")
def test_logits_equal_those_of_the_models_own_code(model: PreTrainedModel) -> None:
    runners = [ModelRunner(copy.deepcopy(model), 4, MAX_LEN, fused=fused) for fused in (True, False)]
    assert [runner._fused is not None for runner in runners] == [True, False]
    rng = random.Random(0)
    token = lambda: rng.randrange(VOCAB)  # noqa: E731
    prompts = [[token() for _ in range(length)] for length in (1, 7, 12)]
    steps: list[tuple[list[Chunk], list[Chunk], list[int]]] = [
        ([], [Chunk(slot, 0, prompt) for slot, prompt in enumerate(prompts)], [0, 7, 19, 3]),
        ([], [Chunk(3, 0, [token() for _ in range(5)])], []),
    ]
    for position in range(4):  # decoding with a draft, and a chunked prompt
        decode = [Chunk(slot, len(prompt) + position, [token()]) for slot, prompt in enumerate(prompts)]
        decode[1] = Chunk(1, len(prompts[1]) + position, [token(), token()])
        steps.append((decode, [Chunk(3, 5 + 3 * position, [token() for _ in range(3)])], [3, 0, 1, 2, 6]))
    for step in steps:
        found, expected = (runner.forward(*step) for runner in runners)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_model_is_not_modified(model: PreTrainedModel) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ModelRunner(model, 2, MAX_LEN)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_unsupported_models() -> None:
    assert not can_fuse(Gemma3ForCausalLM(Gemma3TextConfig(**TINY_SIZES, head_dim=8)))
    assert not can_fuse(LlamaForCausalLM(LlamaConfig(**TINY_SIZES, hidden_act="gelu")))
    assert not can_fuse(make("llama").to(torch.bfloat16))  # type: ignore[arg-type]

    class Changed(LlamaForCausalLM):
        """A subclass whose layers may differ."""

    assert not can_fuse(Changed(LlamaConfig(**TINY_SIZES)))


def test_modified_layers_and_hooks_are_unsupported() -> None:
    class Adapter(nn.Linear):
        """A replaced layer, as adapters make them."""

    model = make("llama")
    assert can_fuse(model)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not can_fuse(model)
    handle.remove()
    model.model.layers[1].mlp.up_proj = Adapter(32, 48, bias=False)
    assert not can_fuse(model)


def test_fallback_if_fused_logits_differ(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama")
    expected = ModelRunner(copy.deepcopy(model), 2, MAX_LEN, fused=False)
    original_forward = FusedDecoder.forward
    monkeypatch.setattr(FusedDecoder, "forward", lambda *arguments: original_forward(*arguments).flip(-1))
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(model, 2, MAX_LEN)
    assert "LlamaForCausalLM runs with the slower code of transformers" in caplog.text
    step: tuple[list[Chunk], list[Chunk], list[int]] = ([], [Chunk(0, 0, [3, 4])], [1])
    torch.testing.assert_close(runner.forward(*step), expected.forward(*step), rtol=1e-4, atol=1e-4)
