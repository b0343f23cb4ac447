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

from logitship.server.model.fused_decoder import FusedLogits, PackedLinear, can_fuse, can_pack
from logitship.server.model.model_runner import Chunk, ModelRunner

from .conftest import TINY_SIZES

ROWS = (1, 3, 8, 33)
HUGE_PAGE = 1 << 21


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@torch.no_grad()
def test_output_equals_that_of_the_layers(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layers = [nn.Linear(48, size, bias=bias) for size in (32, 16, 16)]
    x, other = torch.randn(rows, 48), torch.randn(rows, 64)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    packed = PackedLinear.of(*layers)
    torch.testing.assert_close(packed(x), expected)
    torch.testing.assert_close(packed.add(x, other), expected + other)
    scale = torch.rand(48)
    expected = torch.cat([layer(x * scale) for layer in layers], dim=-1)
    torch.testing.assert_close(PackedLinear.of(*layers, scale=scale)(x), expected)


@torch.no_grad()
def test_arguments_are_not_modified() -> None:
    packed = PackedLinear.of(nn.Linear(8, 8))
    x, other = torch.randn(2, 8), torch.randn(2, 8)
    before = x.clone(), other.clone()
    packed.add(x, other)
    assert torch.equal(x, before[0])
    assert torch.equal(other, before[1])


def test_can_pack() -> None:
    assert can_pack(torch.device("cpu"), torch.float32) == torch.backends.mkldnn.is_available()
    assert not can_pack(torch.device("cpu"), torch.float16)
    assert not can_pack(torch.device("meta"), torch.float32)


VOCAB, MAX_LEN = 64, 48
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
        found, expected = (runner.logits(*step) for runner in runners)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_single_logits_equal_those_of_complete_rows(model: PreTrainedModel, *, fused: bool) -> None:
    """All logits of the first tokens, and single ones of any."""
    runner = ModelRunner(model, 2, MAX_LEN, fused=fused)
    step: tuple[list[Chunk], list[Chunk], list[int]] = ([], [Chunk(0, 0, [3, 4, 5, 6, 7])], [4, 0, 2])
    expected = runner.logits(*step)
    complete, output = runner.forward(*step, 2)
    torch.testing.assert_close(complete, expected[:2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.rows(1, 3), expected[1:], rtol=1e-5, atol=1e-5)
    assert output.rows(1, 1).shape == (0, VOCAB)
    some = output.some(torch.tensor([2, 0, 2]), torch.tensor([9, 1, VOCAB - 1]))
    torch.testing.assert_close(some, expected[(2, 0, 2), (9, 1, VOCAB - 1)], rtol=1e-4, atol=1e-4)


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
    original_rows = FusedLogits.rows
    monkeypatch.setattr(FusedLogits, "rows", lambda *arguments: original_rows(*arguments).flip(-1))
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(model, 2, MAX_LEN)
    assert "LlamaForCausalLM runs with the slower code of transformers" in caplog.text
    step: tuple[list[Chunk], list[Chunk], list[int]] = ([], [Chunk(0, 0, [3, 4])], [1])
    torch.testing.assert_close(runner.logits(*step), expected.logits(*step), rtol=1e-4, atol=1e-4)
