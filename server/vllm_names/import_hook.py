"""Import hook for `import vllm` where vLLM is not installed."""

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
    """Make vLLM's names importable from the modules `vllm` and below, for plugins written for vLLM.

    They resolve to logitship's own classes when they are first used. Does nothing if vLLM is installed, or if called
    again. Package metadata does not change: `importlib.metadata.version("vllm")` still finds no vLLM.

    Returns:
        True if `vllm` is now provided by logitship, False if vLLM is installed.
    """
    if any(isinstance(finder, VllmNamesFinder) for finder in sys.meta_path):
        return True
    if _vllm_is_installed():
        return False
    # First, because a folder `vllm`, such as a clone of its repository, would be found as an empty package.
    sys.meta_path.insert(0, VllmNamesFinder())
    return True


def _vllm_is_installed() -> bool:
    if "vllm" in sys.modules:
        return True
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None  # a folder without `__init__.py` has none


class VllmNamesFinder(MetaPathFinder, Loader):
    """Finds the modules in `NAMES`. For other modules below `vllm`, the error lists the available names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `NAMES`; None for modules outside `vllm`.

        Raises:
            ModuleNotFoundError: a module of vLLM that is not in `NAMES`.
        """
        parent, _, name = fullname.rpartition(".")
        if fullname in NAMES:
            # All are packages: only for a missing name of a package does `from … import` call this finder again.
            return ModuleSpec(fullname, self, origin=__name__, is_package=True)
        if parent not in NAMES:
            return None
        # The name is `vllm`, which plugins check. With the full name, `from vllm import x` would replace this error by
        # its own.
        raise ModuleNotFoundError(_missing(parent, name), name="vllm")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _VllmModule(spec.name, f"Replacement for {spec.name}, because vLLM is not installed.")

    def exec_module(self, module: ModuleType) -> None:
        """Set `__all__`. Names are imported when they are first used."""
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
