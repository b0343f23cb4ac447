"""Fixtures that remove the import hook and all `vllm` modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from logitship.server.vllm_names import enable_vllm_names
from logitship.server.vllm_names.import_hook import VllmNamesFinder


def _pop_vllm_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}


@pytest.fixture
def hook_is_off() -> Iterator[None]:
    """Remove the hook, which engines of other tests have installed, and restore it afterwards."""
    finders, modules = list(sys.meta_path), _pop_vllm_modules()
    sys.meta_path[:] = [finder for finder in finders if not isinstance(finder, VllmNamesFinder)]
    yield
    _pop_vllm_modules()
    sys.meta_path[:] = finders
    sys.modules.update(modules)


@pytest.fixture
def hook_is_on(hook_is_off: None) -> None:
    """Install the hook: logitship provides `vllm`."""
    assert enable_vllm_names()
