"""Import of the class that the command line names: `module:Class`, `file.py:Class` or `file.py`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.batch_processors.interface import LogitsProcessor

from .check_options import UsageError


def import_class(target: str) -> type[CustomLogitProcessor]:
    """Import the processor class that a target names. This runs its module.

    As with `python -m` and `python file.py`, the module can import others from the current folder and from the file's
    folder. Without a class name, the module must define exactly one processor class.

    Raises:
        UsageError: there is no such class, or it is not a processor.
    """
    name, colon, class_name = target.rpartition(":")
    if not colon:
        name, class_name = target, ""
    module = _file(Path(name)) if name.endswith(".py") else _module(name)
    found = _named(module, class_name, target) if class_name else _only_one(module, target)
    return require_processor_class(found, target)


def require_processor_class(found: Any, target: str) -> type[CustomLogitProcessor]:
    """Return `found` if it is a class that can be sent with a request.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(found, CustomLogitProcessor):
        raise UsageError(f"{target} is an instance: name its class, {type(found).__name__}")
    if not isinstance(found, type):
        raise UsageError(f"{target} is not a class but an object of type {type(found).__name__}")
    if issubclass(found, LogitsProcessor) or _is_vllm_processor(found):
        raise UsageError(
            f"{target} is a batch processor, which an operator installs with --logits-processors. logitship check "
            "takes processors that are sent with requests: subclasses of logitship.CustomLogitProcessor"
        )
    if not issubclass(found, CustomLogitProcessor):
        raise UsageError(f"{target} is not a subclass of logitship.CustomLogitProcessor")
    return found


def _is_vllm_processor(cls: type) -> bool:
    return any(
        base.__module__.partition(".")[0] == "vllm" and base.__name__ == "LogitsProcessor" for base in cls.__mro__
    )


def _module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name!r} is neither a module name nor a .py file: use module:Class or path/to/file.py:Class")
    _make_importable(Path.cwd())
    with _explained(name):
        return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    path = path.resolve()
    _make_importable(Path.cwd())
    _make_importable(path.parent)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    # A file may have the name of a module that is already loaded, and must not replace it.
    name = path.stem if loaded is None and path.stem.isidentifier() else f"_checked_{path.stem.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _explained(str(path)):
            spec.loader.exec_module(module)
    except UsageError:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # boundary: author code
        where = _last_own_frame(error)
        raise UsageError(f"cannot import {name}: {type(error).__name__}: {error}{where}") from error


def _last_own_frame(error: BaseException) -> str:
    """Return where in the author's code an import failed, or "" if it failed elsewhere."""
    importers = (__file__, importlib.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if frame.filename not in importers]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _named(module: ModuleType, class_name: str, target: str) -> Any:
    found: Any = module
    for part in class_name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, _processors(module), n=1)
            known = f"did you mean {close[0]}?" if close else f"its processors are: {_listed(_processors(module))}"
            raise UsageError(f"{target}: {module.__name__} has no {class_name!r}; {known}")
        found = getattr(found, part)
    return found


def _only_one(module: ModuleType, target: str) -> Any:
    found = _processors(module)
    if len(found) != 1:
        raise UsageError(f"{target} defines {len(found)} processors ({_listed(found)}): use {target}:Class")
    return getattr(module, found[0])


def _processors(module: ModuleType) -> list[str]:
    """Return the names of the concrete processor classes that the module defines."""
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, CustomLogitProcessor)
        and value.__module__ == module.__name__
        and not isabstract(value)
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
