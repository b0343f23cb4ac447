from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from logitship.sampler.cgroup_limits import MemoryLimit
from logitship.server.config import ServerConfig
from logitship.server.model import memory_check, model_loader
from logitship.server.model.memory_check import (
    NotEnoughMemory,
    free_main_memory,
    outline_of,
    require_memory,
    require_memory_to_start,
)
from logitship.server.model.model_loader import load_model

GIB = 1 << 30


@pytest.fixture
def config(model_folder: Path) -> ServerConfig:
    return ServerConfig(model_path=str(model_folder))


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  700 kB\n")
    assert memory_check._available_memory(meminfo) == 700 * 1024
    meminfo.write_text("MemTotal:  1000 kB\n")
    assert memory_check._available_memory(meminfo) > 0


def test_free_memory_is_at_most_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_limit", MemoryLimit)
    assert 0 < free_main_memory() < math.inf
    monkeypatch.setattr(memory_check, "memory_limit", lambda: MemoryLimit(300.0, 7.0))
    assert free_main_memory() == 7


def outline(config: ServerConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    found = outline_of(AutoConfig.from_pretrained(config.model_path), dtype, False)
    assert found is not None
    return found


def test_outline_has_the_size_of_the_model_and_no_data(config: ServerConfig) -> None:
    model = load_model(config).model
    weights = {id(each): each.nbytes for each in model.parameters()}
    found = outline(config)
    assert {each.device.type for each in found.parameters()} == {"meta"}
    buffers = sum(each.nbytes for each in model.buffers())
    assert found.get_memory_footprint() == sum(weights.values()) + buffers
    halved = outline(config, torch.bfloat16)
    assert 0.4 < halved.get_memory_footprint() / found.get_memory_footprint() < 0.6


def test_model_that_cannot_be_outlined_is_loaded(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outline_of(object(), torch.float32, False) is None
    monkeypatch.setattr(model_loader, "outline_of", lambda *_: None)
    monkeypatch.setattr(memory_check, "memory_limit", lambda: MemoryLimit(1.0, 0.0))
    assert load_model(config).vocab_size > 0


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_check, "memory_limit", lambda: MemoryLimit(GIB, GIB / 8))
    with pytest.raises(NotEnoughMemory) as caught:
        load_model(config)
    assert str(caught.value).startswith(
        f"the weights of {config.model_path} take 0.00 GiB in float32, and 0.12 GiB of "
    )
    assert "memory are free of the 1.00 GiB that the container may use: at least 0.13 GiB more" in str(caught.value)


def test_start_needs_memory_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_main_memory", lambda: float(memory_check._BEFORE_MODEL))
    require_memory_to_start()
    monkeypatch.setattr(memory_check, "free_main_memory", lambda: float(100 << 20))
    with pytest.raises(NotEnoughMemory, match=r"at least 0\.20 GiB more are needed, and the size of"):
        require_memory_to_start()


@pytest.mark.parametrize("missing", [0, 1])
def test_exactly_what_is_needed(config: ServerConfig, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    found = outline(config)
    needed = found.get_memory_footprint() + memory_check._BESIDE_WEIGHTS
    monkeypatch.setattr(memory_check, "free_main_memory", lambda: needed - missing)
    if missing:
        with pytest.raises(NotEnoughMemory, match=r"at least 0\.00 GiB more are needed"):
            require_memory(found, "model")
    else:
        require_memory(found, "model")
