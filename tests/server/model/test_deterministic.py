"""Batch-invariant inference: each token's logits equal those computed alone, to the last bit."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.model.deterministic import (
    DETERMINISTIC_ATTENTION_NAME,
    TILE,
    RowTiles,
    TokenByToken,
    make_deterministic,
)
from logitship.server.model.deterministic_check import NotDeterministic, check_determinism
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import Chunk, ModelRunner
from logitship.server.refusals import UnsupportedModel

from .conftest import TINY_SIZES

SIZES = {**TINY_SIZES, "vocab_size": 67, "intermediate_size": 45}  # not multiples of the vector width
VOCAB, MAX_LEN, SLOTS = SIZES["vocab_size"], SIZES["max_position_embeddings"], 5
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 20,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, tied weights": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gemma3, both kinds of layers": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=3, layer_types=["sliding_attention", "full_attention"])
    ),
    "qwen3, norms of queries and keys": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12)),
    "phi3, frequencies by the longest sequence": lambda: Phi3ForCausalLM(
        Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=20)
    ),
    "gpt2, learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=36, n_layer=2, n_head=3, n_positions=MAX_LEN, bos_token_id=0, eos_token_id=1
        )
    ),
}


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = MODELS[name]().train(False)
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    return make("llama")


def token_by_token(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """Return the logits of each token, computed alone in the first slot: float32 [tokens, vocab]."""
    return torch.cat([runner.logits([], [Chunk(0, at, [token])], [0]) for at, token in enumerate(token_ids)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_logits_are_batch_invariant(threads: int, dtype: torch.dtype, model: PreTrainedModel) -> None:
    model = model.to(dtype)  # type: ignore[attr-defined]
    rng = random.Random(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = ModelRunner(model, SLOTS, MAX_LEN, deterministic=True)
        for layer in (*runner.cache.keys, *runner.cache.values):
            layer.normal_()  # values of earlier sequences must not matter
        known = [[rng.randrange(VOCAB) for _ in range(MAX_LEN)] for _ in range(3)]
        expected = [token_by_token(runner, token_ids) for token_ids in known]
        computed: dict[int, tuple[int, int]] = {}  # slot → sequence, tokens computed
        for _ in range(25):
            for slot in range(SLOTS):
                if slot in computed and (computed[slot][1] == MAX_LEN or rng.random() < 0.05):
                    del computed[slot]
                elif slot not in computed and rng.random() < 0.5:
                    computed[slot] = (rng.randrange(len(known)), 0)
            running = [slot for slot in computed if rng.random() < 0.8]
            rng.shuffle(running)
            decoding = [slot for slot in running if computed[slot][1] > 0 and rng.random() < 0.6]
            chunks = {}
            for slot in [*decoding, *(slot for slot in running if slot not in decoding)]:
                sequence, start = computed[slot]
                length = rng.randint(1, 4 if slot in decoding else 20)  # a decoding sequence may have drafts
                chunks[slot] = Chunk(slot, start, known[sequence][start : start + length])
            if not chunks:
                continue
            wanted = [
                (computed[slot][0], position)
                for slot, chunk in chunks.items()
                for position in range(chunk.start, chunk.start + len(chunk.token_ids))
            ]
            keep = rng.choices(range(len(wanted)), k=rng.randint(0, len(wanted)))
            got = runner.logits(
                [chunks[slot] for slot in decoding], [chunks[slot] for slot in chunks if slot not in decoding], keep
            )
            for row, token in zip(got, keep, strict=True):
                sequence, position = wanted[token]
                assert torch.equal(row, expected[sequence][position])
            for slot, chunk in chunks.items():
                # Some of the tokens were rejected drafts: they are computed again.
                accepted = len(chunk.token_ids) if slot not in decoding else rng.randint(1, len(chunk.token_ids))
                computed[slot] = (computed[slot][0], chunk.start + accepted)
    finally:
        torch.set_num_threads(before)


def test_logits_equal_those_of_the_model(model: PreTrainedModel) -> None:
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    token_ids = list(range(2, 20))
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    runner = ModelRunner(model, 1, MAX_LEN, deterministic=True)
    got = runner.logits([], [Chunk(0, 0, token_ids)], list(range(18)))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_model_is_unchanged_without_the_flag(llama: PreTrainedModel) -> None:
    before = [(name, type(module)) for name, module in llama.named_modules()]
    ModelRunner(llama, 1, MAX_LEN)
    assert [(name, type(module)) for name, module in llama.named_modules()] == before


def test_parameters_are_unchanged() -> None:
    model = make("llama, tied weights")
    before = {id(parameter) for parameter in model.parameters()}
    make_deterministic(model)
    assert {id(parameter) for parameter in model.parameters()} == before
    assert model.lm_head.module.weight is model.get_input_embeddings().weight


def test_model_can_serve_a_second_engine(llama: PreTrainedModel) -> None:
    ModelRunner(llama, 1, MAX_LEN, deterministic=True)
    names = [name for name, _ in llama.named_modules()]
    check_determinism(ModelRunner(llama, 3, MAX_LEN, deterministic=True))
    assert [name for name, _ in llama.named_modules()] == names


def test_all_batch_dependent_modules_are_replaced(llama: PreTrainedModel) -> None:
    make_deterministic(llama)
    replaced = {
        name.removeprefix("model.layers.1."): module.size if isinstance(module, RowTiles) else 1
        for name, module in llama.named_modules()
        if isinstance(module, RowTiles | TokenByToken) and ".layers.0." not in name
    }
    assert replaced == {
        "self_attn.q_proj": TILE,
        "self_attn.k_proj": TILE,
        "self_attn.v_proj": TILE,
        "self_attn.o_proj": TILE,
        "mlp.gate_proj": TILE,
        "mlp.up_proj": TILE,
        "mlp.down_proj": TILE,
        "mlp.act_fn": 1,
        "input_layernorm": TILE,
        "post_attention_layernorm": TILE,
        "model.norm": TILE,
        "model.rotary_emb": 1,
        "lm_head": TILE,
    }
    assert llama.config._attn_implementation == DETERMINISTIC_ATTENTION_NAME


# RowTiles and TokenByToken


class ShapeRecorder(nn.Module):
    """Doubles each row, and records the shapes and alignments of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.misaligned = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(x.shape))
        self.misaligned += x.data_ptr() % 64 != 0
        return torch.cat([x, x], dim=-1)


@pytest.mark.parametrize("leading", [(1,), (1, 16), (1, 17), (2, 3, 7), (33,)])
def test_tiles_have_one_shape(leading: tuple[int, ...]) -> None:
    module = ShapeRecorder()
    x = torch.randn(*leading, 5)
    assert torch.equal(RowTiles(module, TILE)(x), torch.cat([x, x], dim=-1))
    assert set(module.shapes) == {(TILE, 5)}
    assert len(module.shapes) == -(-x[..., 0].numel() // TILE)
    assert module.misaligned == 0


def test_non_contiguous_input() -> None:
    x = torch.randn(1, 4, 20, 6).transpose(1, 2)
    assert torch.equal(RowTiles(ShapeRecorder(), TILE)(x), torch.cat([x, x], dim=-1))


def test_empty_input() -> None:
    assert RowTiles(nn.Linear(4, 3), TILE)(torch.empty(1, 0, 4)).shape == (1, 0, 3)


def test_rotary_positions_are_computed_token_by_token() -> None:
    class ByLongest(nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
            return position_ids[..., None] * scale, position_ids.max().expand(*position_ids.shape, 2)

    first, second = TokenByToken(ByLongest())(torch.empty(0), torch.tensor([[4, 9, 2]]), scale=2.0)
    assert first.tolist() == [[[8], [18], [4]]]
    assert second.tolist() == [[[4, 4], [9, 9], [2, 2]]]


# Refused layers


class QuantizedLinear(nn.Linear):
    pass


class PackedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))


class PackedParameter(nn.Parameter):
    pass


def with_packed_parameter() -> nn.Module:
    linear = nn.Linear(32, 32, bias=False)
    linear.weight = PackedParameter(linear.weight.detach())
    return linear


@pytest.mark.parametrize(
    ("make_layer", "kind"),
    [
        (lambda: QuantizedLinear(32, 32), "QuantizedLinear"),
        (PackedWeights, "PackedWeights"),
        (with_packed_parameter, "Linear"),
        (lambda: nn.Conv1d(32, 32, 1), "Conv1d"),
    ],
)
def test_unsupported_layers_are_refused_by_name(
    make_layer: Callable[[], nn.Module], kind: str, llama: PreTrainedModel
) -> None:
    llama.model.layers[1].self_attn.o_proj = make_layer()
    with pytest.raises(
        UnsupportedModel,
        match=rf"^LlamaForCausalLM cannot be served with --enable-deterministic-inference: "
        rf"model\.layers\.1\.self_attn\.o_proj is a {kind}, ",
    ):
        ModelRunner(llama, 1, MAX_LEN, deterministic=True)


def test_experts_are_refused() -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp\.\w+ is a Qwen3Moe"):
        ModelRunner(Qwen3MoeForCausalLM(config).train(False), 1, MAX_LEN, deterministic=True)


# The check at start


class DependsOnOtherRows(nn.Module):
    """A norm that depends slightly on the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-6 * x.mean())


class DependsOnRowIndex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.linspace(1, 1 + 1e-5, x.shape[-2])[:, None]


class DependsOnCallCount(nn.Module):
    """A norm whose output depends on the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 1e-7 * self.calls)


@pytest.mark.parametrize("broken", [DependsOnOtherRows, DependsOnRowIndex, DependsOnCallCount])
def test_check_detects_batch_dependent_layers(broken: Callable[[], nn.Module], llama: PreTrainedModel) -> None:
    runner = ModelRunner(llama, SLOTS, MAX_LEN, deterministic=True)
    check_determinism(runner)
    llama.model.layers[1].post_attention_layernorm = broken()
    with pytest.raises(
        NotDeterministic, match=r"^--enable-deterministic-inference: LlamaForCausalLM in torch\.float32"
    ):
        check_determinism(runner)


def test_check_detects_an_unmodified_model(llama: PreTrainedModel) -> None:
    with pytest.raises(NotDeterministic, match="Leave the flag out"):
        check_determinism(ModelRunner(llama, SLOTS, MAX_LEN))


@pytest.mark.parametrize(("slots", "max_len"), [(1, 1), (1, 7), (2, 48)])
def test_check_works_with_a_small_cache(slots: int, max_len: int, llama: PreTrainedModel) -> None:
    check_determinism(ModelRunner(llama, slots, max_len, deterministic=True))


def test_cublas_workspace_is_configured(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_deterministic(llama)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"))
    make_deterministic(llama)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic(llama)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_flag_enables_batch_invariance_and_the_check(
    loaded_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[ModelRunner] = []
    monkeypatch.setattr("logitship.server.engine.build.check_determinism", checked.append)
    for flag in (True, False):
        model = copy.deepcopy(loaded_model.model)
        config = ServerConfig(model_path="tiny", max_num_seqs=2, enable_deterministic_inference=flag)
        loaded = LoadedModel(model, loaded_model.tokenizer, frozenset({1}), vocab_size=260, max_len=512)
        build_engine(config, loaded).stop()
        assert isinstance(model.get_submodule("lm_head"), RowTiles) == flag
        assert len(checked) == 1
