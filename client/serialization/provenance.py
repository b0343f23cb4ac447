"""Distinction between the author's own code, which is pickled by value, and installed libraries."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

SERVER_PACKAGES = frozenset(
    {"dill", "numpy", "orjson", "sglang", "tokenizers", "torch", "transformers", "triton", "vllm"}
)
"""Packages that every server has, wherever they are here (a developer may build torch in a home folder)."""


def top_level(module_name: str) -> str:
    """Return the top-level package: `"torch"` for `"torch.nn.functional"`."""
    return module_name.partition(".")[0]


def is_installed(module_name: str | None) -> bool:
    """Return True for the standard library and installed distributions, False for code that only the author has.

    Scripts, notebooks, project folders and editable installs are the author's; so is logitship itself, because a stock
    SGLang server does not have it.
    """
    if module_name is None:
        return False
    top = top_level(module_name)
    if top in SERVER_PACKAGES:
        return True
    if top in {"__main__", "__mp_main__", "logitship"}:
        return False
    module = sys.modules.get(top)
    path = _path(module)
    if top in sys.stdlib_module_names:
        # The author may have a file that shadows a module of the standard library.
        return path is None or any(path.is_relative_to(folder) for folder in _stdlib_folders())
    return path is not None and _is_install_folder(path.parent)


def is_own_extension(module_name: str | None) -> bool:
    """Return whether the module is compiled code that only the author has."""
    path = _path(sys.modules.get(module_name or ""))
    return path is not None and path.name.endswith(tuple(EXTENSION_SUFFIXES)) and not is_installed(module_name)


def _path(module: ModuleType | None) -> Path | None:
    """Return the module's file, or the package's folder; None if it has neither."""
    folders = list(getattr(module, "__path__", ()))
    location = folders[0] if folders else getattr(module, "__file__", None)
    return Path(location).resolve() if location else None


@cache
def _stdlib_folders() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


@cache
def _is_install_folder(folder: Path) -> bool:
    """Return whether the folder holds installed packages: a `.dist-info` next to them; not for editable installs."""
    if folder.name in {"site-packages", "dist-packages"}:
        return True
    return any(folder.glob("*.dist-info"))
