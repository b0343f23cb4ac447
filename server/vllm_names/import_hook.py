"""The one import hook: answers `import vllm` where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from .names import HINTS, NAMES


def enable_vllm_names() -> bool:
    """Let plugins written for vLLM import its names here, from the modules `vllm` and below.

    They resolve to logitship's own classes, when they are first used. Does nothing where vLLM is installed, and nothing
    when called again. Package metadata stays as it is: `importlib.metadata.version("vllm")` still finds no vLLM.

    Returns:
        True if `vllm` is ours now, False if vLLM is installed.
    """
    if any(isinstance(finder, VllmNamesFinder) for finder in sys.meta_path):
        return True
    if _vllm_is_installed():
        return False
    # First: a folder `vllm`, such as a clone of its repository, would be found as a package without content.
    sys.meta_path.insert(0, VllmNamesFinder())
    return True


def _vllm_is_installed() -> bool:
    if "vllm" in sys.modules:
        return True
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None  # a folder without `__init__.py` has none


class VllmNamesFinder(MetaPathFinder, Loader):
    """Finds the modules of the table, and says of others below `vllm` what there is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for a module of the table; None for what is not vLLM's.

        Raises:
            ModuleNotFoundError: vLLM's, and not in the table.
        """
        parent, _, name = fullname.rpartition(".")
        if fullname in NAMES:
            # All as packages: only of a package's missing name does `from … import` ask here, and so gets our message.
            return ModuleSpec(fullname, self, origin=__name__, is_package=True)
        if parent not in NAMES:
            return None
        # Named after what is missing, as plugins look for it. Under the full name, `from vllm import x` would replace
        # this error by its own.
        raise ModuleNotFoundError(_missing(parent, name), name="vllm")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, empty."""
        return _VllmModule(spec.name, f"Stands for {spec.name}, since vLLM is not installed.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is imported before a name is used."""
        vars(module)["__all__"] = sorted(NAMES[module.__name__])


class _VllmModule(ModuleType):
    """A module whose names are imported when they are first used."""

    def __getattr__(self, name: str) -> Any:
        if name in NAMES[self.__name__]:
            value = resolve_name(NAMES[self.__name__][name])
            setattr(self, name, value)
            return value
        if f"{self.__name__}.{name}" in NAMES:
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(_missing(self.__name__, name), name=name, obj=self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *NAMES[self.__name__], *_submodules(self.__name__)})


def _missing(module: str, name: str) -> str:
    offered = ", ".join((*sorted(NAMES[module]), *_submodules(module)))
    sentences = (
        f"vLLM is not installed, and in its place logitship has no {name!r} in {module!r}, only: {offered}",
        HINTS.get(f"{module}.{name}", "What needs the rest of vLLM runs with vLLM installed"),
    )
    return ". ".join(sentences)


def _submodules(module: str) -> list[str]:
    return sorted(name for parent, _, name in (full.rpartition(".") for full in NAMES) if parent == module)
