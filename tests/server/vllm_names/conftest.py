"""A process in which the hook is off, and `vllm` was never imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from logitship.server.vllm_names import enable_vllm_names
from logitship.server.vllm_names.import_hook import VllmNamesFinder


def _take_vllm_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}


@pytest.fixture
def hook_is_off() -> Iterator[None]:
    """Engines that other tests built have turned it on; afterwards it is as it was."""
    finders, modules = list(sys.meta_path), _take_vllm_modules()
    sys.meta_path[:] = [finder for finder in finders if not isinstance(finder, VllmNamesFinder)]
    yield
    _take_vllm_modules()
    sys.meta_path[:] = finders
    sys.modules.update(modules)


@pytest.fixture
def hook_is_on(hook_is_off: None) -> None:
    """`vllm` is ours."""
    assert enable_vllm_names()
