"""Whose code is it: the author's own, which must travel with the class, or an installed library's?"""

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
"""Packages that every server has, wherever they lie here (a developer's torch may well be built in a home folder)."""


def top_level(module_name: str) -> str:
    """`"torch"` for `"torch.nn.functional"`."""
    return module_name.partition(".")[0]


def is_installed(module_name: str | None) -> bool:
    """True for the standard library and installed distributions, False for code that only the author has.

    A script, a notebook, a project folder and an editable install are the author's; so is logitship itself, because a
    stock SGLang server does not have it.
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
        # A file of the author's may shadow a module of the standard library.
        return path is None or any(path.is_relative_to(folder) for folder in _stdlib_folders())
    return path is not None and _is_install_folder(path.parent)


def is_own_extension(module_name: str | None) -> bool:
    """True if the module is compiled code that only the author has."""
    path = _path(sys.modules.get(module_name or ""))
    return path is not None and path.name.endswith(tuple(EXTENSION_SUFFIXES)) and not is_installed(module_name)


def _path(module: ModuleType | None) -> Path | None:
    """The module's file, or a package's folder; None if it has neither."""
    folders = list(getattr(module, "__path__", ()))
    location = folders[0] if folders else getattr(module, "__file__", None)
    return Path(location).resolve() if location else None


@cache
def _stdlib_folders() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


@cache
def _is_install_folder(folder: Path) -> bool:
    """Installers leave a `.dist-info` beside what they install; an editable install leaves it elsewhere."""
    if folder.name in {"site-packages", "dist-packages"}:
        return True
    return any(folder.glob("*.dist-info"))
