"""Pickler with what the handlers for single types need: names for error messages, and calls in the pickle.

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


class BasePickler(dill._dill.Pickler):  # type: ignore[misc]
    """dill's pickler, which also knows whose code an object is and where it is used."""

    def __init__(self, file: io.BytesIO, own_packages: Iterable[str] = ()) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._own_packages = frozenset(own_packages)
        self._path: list[tuple[str, Any]] = []
        self._last_calls: list[tuple[Any, ...]] = []
        self._data_only = False

    # --- where we are, for messages ---

    @contextmanager
    def at(self, label: str, value: Any) -> Iterator[None]:
        """Name what is written inside of the `with`: "global 'x' used by f", and the value itself."""
        self._path.append((label, value))
        yield
        self._path.pop()  # not on an error: _dump still needs it

    def here(self) -> str:
        """The innermost name."""
        return self._path[-1][0] if self._path else "the class"

    def refuse(self, value: Any, what: str, mend: str = "") -> ProcessorSerializationError:
        """The error to raise for a value that cannot travel."""
        verb = "is" if self._path and self._path[-1][1] is value else "holds"
        message = f"{self.here()} {verb} {what}, which cannot travel"
        return ProcessorSerializationError(f"{message}: {mend}" if mend else message)

    # --- by value or by name ---

    def is_own(self, module_name: str | None) -> bool:
        """True if what is in the module travels by value."""
        return not is_installed(module_name) or top_level(module_name or "") in self._own_packages

    def is_by_name(self, obj: Any) -> bool:
        """True if an installed library has this very object under the object's own name."""
        module = getattr(obj, "__module__", None)
        if self.is_own(module):
            return False
        found: Any = sys.modules.get(str(module))
        for part in getattr(obj, "__qualname__", obj.__name__).split("."):
            found = getattr(found, part, None)
        return found is obj

    def is_root(self, cls: type) -> bool:
        """True for the class that is being pickled, which always travels by value."""
        return bool(self._path) and self._path[0][1] is cls

    def check_code_allowed(self, obj: Any) -> None:
        """Refuse a function or class of the author's inside of `dump_data`."""
        if self._data_only:
            raise self.refuse(obj, "code")

    # --- writing ---

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Write a call for its effect."""
        self.save_reduce(function, args)
        self.write(pickle.POP)

    def call_last(self, function: Callable[..., Any], *args: Any) -> None:
        """Write a call for its effect, when all else is written."""
        self._last_calls.append((function, *args))

    def build(self, attributes: dict[str, Any]) -> None:
        """Write the setting of attributes of the object that was written last."""
        self.save((None, attributes))
        self.write(pickle.BUILD)

    def save_name(self, obj: Any, module: str, qualname: str) -> None:
        """Write an object as a name that need not exist here."""
        self.save(module)
        self.save(qualname)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)
