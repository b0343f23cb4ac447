"""Base pickler with the helpers that the handlers of single types call.

The handlers are in `pickled_classes.py`, `pickled_functions.py` and `pickled_modules.py`; `class_pickler.py` puts them
into one table. These modules import dill.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import dill._dill

from logitship.client.errors import ProcessorSerializationError
from logitship.client.serialization.provenance import is_installed, top_level

PROTOCOL = 4


DillPickler: Any = dill._dill.Pickler
"""Untyped, because typeshed does not know the methods of the pickler that is written in Python."""


class BasePickler(DillPickler):  # type: ignore[misc]
    """dill's pickler, with error messages that say where an object is used."""

    def __init__(self, file: io.BytesIO, own_packages: Iterable[str] = ()) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._own_packages = frozenset(own_packages)
        self._path: list[tuple[str, Any]] = []
        self._last_calls: list[tuple[Any, ...]] = []
        self._data_only = False

    # --- error messages ---

    @contextmanager
    def at(self, label: str, value: Any) -> Iterator[None]:
        """Set the label that error messages inside the `with` use for `value`, such as "global 'x' used by f"."""
        self._path.append((label, value))
        yield
        self._path.pop()  # not on an error: _dump still needs it

    def here(self) -> str:
        """Return the innermost label."""
        return self._path[-1][0] if self._path else "the class"

    def refuse(self, value: Any, what: str, fix: str = "") -> ProcessorSerializationError:
        """Return the error to raise for a value that cannot be serialized."""
        verb = "is" if self._path and self._path[-1][1] is value else "holds"
        message = f"{self.here()} {verb} {what}, which cannot be serialized"
        return ProcessorSerializationError(f"{message}: {fix}" if fix else message)

    # --- by value or by name ---

    def is_own(self, module_name: str | None) -> bool:
        """Return whether the contents of the module are pickled by value."""
        return not is_installed(module_name) or top_level(module_name or "") in self._own_packages

    def is_by_name(self, obj: Any) -> bool:
        """Return whether an installed library has this very object under the object's own name."""
        module = getattr(obj, "__module__", None)
        if self.is_own(module):
            return False
        found: Any = sys.modules.get(str(module))
        for part in getattr(obj, "__qualname__", obj.__name__).split("."):
            found = getattr(found, part, None)
        return found is obj

    def is_root(self, cls: type) -> bool:
        """Return whether this is the class being pickled, which is always pickled by value."""
        return bool(self._path) and self._path[0][1] is cls

    def check_code_allowed(self, obj: Any) -> None:
        """Refuse a function or class of the author in `dump_data`."""
        if self._data_only:
            raise self.refuse(obj, "code")

    # --- writing ---

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Write a call for its effect."""
        self.save_reduce(function, args)
        self.write(pickle.POP)

    def call_last(self, function: Callable[..., Any], *args: Any) -> None:
        """Write a call for its effect, after everything else."""
        self._last_calls.append((function, *args))

    def build(self, attributes: dict[str, Any]) -> None:
        """Write the assignment of attributes of the object written last."""
        self.save((None, attributes))
        self.write(pickle.BUILD)

    def save_name(self, obj: Any, module: str, qualname: str) -> None:
        """Write an object as a name that need not exist in this process."""
        self.save(module)
        self.save(qualname)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)
