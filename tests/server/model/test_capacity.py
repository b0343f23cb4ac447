from __future__ import annotations

import logging

import pytest
import torch

from logitship.sampler.cgroup_limits import MemoryLimit
from logitship.server.config import ServerConfig
from logitship.server.model import capacity, memory_check
from logitship.server.model.capacity import CacheTooLarge, free_bytes, max_model_len, prefix_cache_blocks
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import cache_shape

MODEL_LEN = 512


@pytest.fixture
def token_bytes(float32_model: LoadedModel) -> int:
    """Bytes of one position of four sequences: 2 layers, keys and values, 2 heads of 8 float32 numbers."""
    nbytes = cache_shape(float32_model.model, 4, 1).nbytes(torch.float32)
    assert nbytes == 4 * 2 * 2 * 2 * 8 * 4
    return nbytes


def length(loaded: LoadedModel, free: int, **settings: float | None) -> int:
    config = ServerConfig(max_num_seqs=4, **{"prefix_cache_bytes": 0, **settings})  # type: ignore[arg-type]
    return max_model_len(config, loaded.model, MODEL_LEN, free)


def test_model_length_if_it_fits(float32_model: LoadedModel, token_bytes: int) -> None:
    assert length(float32_model, 2 * MODEL_LEN * token_bytes) == MODEL_LEN
    assert length(float32_model, 2 * MODEL_LEN * token_bytes, max_model_len=100) == 100


def test_length_that_fits_into_memory(
    float32_model: LoadedModel,
    token_bytes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert length(float32_model, 200 * token_bytes) == 100
    assert "serving sequences of up to 100 tokens, not the model's 512" in caplog.text
    assert length(float32_model, 200 * token_bytes, mem_fraction_static=1.0) == 200


def test_operators_length_that_does_not_fit_is_refused(float32_model: LoadedModel, token_bytes: int) -> None:
    with pytest.raises(CacheTooLarge, match=r"--max-model-len \(at most 100\), --max-num-seqs"):
        length(float32_model, 200 * token_bytes, max_model_len=101)


def test_not_even_one_token_fits(float32_model: LoadedModel, token_bytes: int) -> None:
    with pytest.raises(CacheTooLarge, match="lower --max-num-seqs or --prefix-cache-bytes, or raise"):
        length(float32_model, token_bytes)


def test_prefix_cache_reduces_the_length(float32_model: LoadedModel, token_bytes: int) -> None:
    free = 200 * token_bytes
    assert length(float32_model, free, prefix_cache_bytes=30 * token_bytes) == 70
    assert length(float32_model, free, prefix_cache_bytes=None) == 90
    with pytest.raises(CacheTooLarge, match="lower --max-num-seqs or --prefix-cache-bytes"):
        length(float32_model, free, prefix_cache_bytes=100 * token_bytes)

    def blocks(**settings: int) -> int:
        return prefix_cache_blocks(ServerConfig(max_num_seqs=4, **settings), float32_model.model, 64, free)  # type: ignore[arg-type]

    # A block has 16 tokens of one sequence; a position of the slots has one token of each of four.
    assert blocks(prefix_cache_bytes=8 * token_bytes) == 2
    assert blocks() == 10 * 4 // 16
    assert blocks(prefix_cache_bytes=free) == 4 * 64 // 16


def test_longer_than_the_model_is_refused(float32_model: LoadedModel) -> None:
    with pytest.raises(CacheTooLarge, match="--max-model-len 513 is longer than the model's own length, 512"):
        length(float32_model, 1 << 40, max_model_len=513)


def test_packed_weights_are_not_free(
    float32_model: LoadedModel, loaded_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "_free_bytes", lambda device: 1 << 20)
    model = float32_model.model
    matrices = [each.nbytes for name, each in model.named_parameters(remove_duplicate=False) if "proj" in name]
    packed = sum(matrices) + model.get_output_embeddings().weight.nbytes
    assert 0 < packed < 1 << 20
    assert free_bytes(ServerConfig(), model) == (1 << 20) - packed
    assert free_bytes(ServerConfig(model_impl="transformers"), model) == 1 << 20
    assert free_bytes(ServerConfig(enable_deterministic_inference=True), model) == 1 << 20
    assert free_bytes(ServerConfig(), loaded_model.model) == 1 << 20  # float64
    monkeypatch.setattr(capacity, "_free_bytes", lambda device: packed // 2)
    assert free_bytes(ServerConfig(), model) == 0


def test_free_bytes_of_this_machine() -> None:
    assert capacity._free_bytes(torch.device("cpu")) > 0


def test_limit_of_the_container_is_named(
    float32_model: LoadedModel, token_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "memory_limit", lambda: MemoryLimit(1 << 30, 1 << 20))
    with pytest.raises(CacheTooLarge, match=r"GiB that are free of the 1\.00 GiB that the container may use: lower"):
        length(float32_model, 200 * token_bytes, max_model_len=101)
