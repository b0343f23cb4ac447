"""Pickle a class by value, for any `dill.loads`.

`dill.dumps` sends a class by reference if its module can be imported *here*, and ties the functions of a script to the
`__main__` of the process that loads them. This pickler writes with dill's constructors, so that dill alone reads it,
but decides differently:

- The author's own code is pickled by value, installed code by name (`provenance.py`).
- The author's modules become empty modules that hold only the names that the class uses (`pickled_modules.py`).
- Functions and classes are created bare, then filled (`pickled_functions.py`, `pickled_classes.py`).
- Annotations are pickled as text: nothing runs them.
- The same class gives the same bytes in every process: sets are sorted, equal strings are one object, and file names
  lose their folders.

This module and the `pickled_` ones import dill; `serialize.py` imports this one when a class is really serialized.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterable
from typing import Any, ClassVar

import dill._dill

from logitship.client.errors import ProcessorSerializationError
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.provenance import is_own_extension

from .pickled_classes import save_class
from .pickled_functions import save_cell, save_code, save_function
from .pickled_modules import GlobalsProxy, ModulePickler, Namespace, save_globals_proxy, save_module, save_namespace
from .reductions import (
    TYPE_PARAMETERS,
    RawBytes,
    TypeAliasType,
    ordered,
    reduce_type_alias,
    reduce_type_parameter,
    reduce_value,
    sentinel_name,
    unserializable_kind,
)


class _Root:
    """The class to pickle. Saving it saves the class, then the calls that must come last."""

    def __init__(self, cls: type) -> None:
        self.cls = cls


class _Dispatch(dict[type, Any]):
    """Our handlers, then dill's. A class with any metaclass is saved as a class."""

    def get(self, key: type, default: Any = None) -> Any:
        if key in self:
            return self[key]
        if issubclass(key, type):
            return save_class
        return dill._dill.Pickler.dispatch.get(key, default)


class ClassPickler(ModulePickler):
    """Pickler that writes one class, and everything it uses, to a file.

    Args:
        file: the file.
        own_packages: see `own_packages` in `serialize.py`.
        artifact_size: bytes of a tensor or array from which on the file has only its digest; None: it has all bytes.

    Attributes:
        artifacts: the tensors and arrays that the file does not have, by their digests.

    Raises:
        ProcessorSerializationError: from `dump_class` and `dump_data`; names the object that cannot be
            serialized and where it is used.
    """

    dispatch: ClassVar[_Dispatch] = _Dispatch()

    def __init__(self, file: io.BytesIO, own_packages: Iterable[str] = (), *, artifact_size: int | None = None) -> None:
        super().__init__(file, own_packages)
        self._aliases: set[int] = set()
        self.artifacts: dict[str, Artifact] = {}
        self._artifact_size = artifact_size
        self._canonical: dict[Any, Any] = {}

    def dump_class(self, cls: type) -> None:
        """Pickle `cls` by value."""
        self._dump(_Root(cls))

    def dump_data(self, values: dict[str, Any]) -> None:
        """Pickle values without any code of the author: no bytecode, so every Python version can read them."""
        self._data_only = True
        self._dump(values)

    def _dump(self, root: Any) -> None:
        try:
            self.dump(root)
        except ProcessorSerializationError:
            raise
        except RecursionError as error:
            raise ProcessorSerializationError(f"{self.here()} is nested too deeply to be serialized") from error
        # `__reduce__` and `__getstate__` are the author's code.
        except Exception as error:  # boundary: author code
            raise ProcessorSerializationError(
                f"{self.here()} cannot be serialized: {type(error).__name__}: {error}"
            ) from error

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Write any object."""
        # Whether two equal strings are one object depends on the process (interning, .pyc files), and shows in the
        # bytes as a memo reference.
        if type(obj) in (str, bytes):
            obj = self._canonical.setdefault((type(obj), obj), obj)
        elif type(obj) is tuple and obj and all(type(item) is str for item in obj):
            obj = self._canonical.setdefault((tuple, obj), obj)
        super().save(obj, save_persistent_id)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce objects that pickle and dill would write in a form that means something else in another process."""
        if what := unserializable_kind(obj):
            raise self.refuse(obj, what)
        if name := sentinel_name(obj):
            return name
        if isinstance(obj, TYPE_PARAMETERS) and not self.is_by_name(obj):
            return reduce_type_parameter(obj)
        if isinstance(obj, TypeAliasType) and not self.is_by_name(obj):
            if id(obj) in self._aliases:
                raise self.refuse(obj, f"the type alias {obj.__name__}, which contains itself")
            self._aliases.add(id(obj))
            try:
                return reduce_type_alias(obj)
            except NameError as error:  # it is evaluated only now
                raise self.refuse(obj, f"the type alias {obj.__name__}, of which the {error}") from error
        return reduce_value(obj)

    def persistent_id(self, obj: Any) -> Any:
        """Return the digest of an artifact; None for all other objects."""
        if type(obj) is not RawBytes or self._artifact_size is None or len(obj.data) < self._artifact_size:
            return None
        artifact = Artifact.of(obj.data)
        return self.artifacts.setdefault(artifact.digest, artifact).digest

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write an object of an installed library by name."""
        module = getattr(obj, "__module__", None)
        if module is None:
            module = pickle.whichmodule(obj, name or obj.__name__)  # type: ignore[attr-defined]
        if is_own_extension(module):
            raise self.refuse(obj, f"{name or obj!r} of your compiled module {module}")
        if self.is_own(module):
            raise self.refuse(obj, f"{name or obj!r}, known only by its name in your module {module}")
        super().save_global(obj, name)

    def _save_root(self, root: _Root) -> None:
        with self.at(f"class {root.cls.__qualname__}", root.cls):
            self.save(root.cls)
        for call in self._last_calls:
            self.call(*call)

    def _save_raw_bytes(self, raw: RawBytes) -> None:
        self.save_reduce(bytearray, (raw.data,), obj=raw)

    def _save_set(self, items: set[Any] | frozenset[Any]) -> None:
        """Write a set in an order that does not depend on the process."""
        self.save_reduce(type(items), (ordered(items),), obj=items)

    def _save_dict(self, items: dict[Any, Any]) -> None:
        """Write a dict that is not a module's globals."""
        module = sys.modules.get(items["__name__"]) if isinstance(items.get("__name__"), str) else None
        if module is not None and module.__dict__ is items:
            raise self.refuse(items, f"the globals() of module {module.__name__}")
        # Not dill's method: it compares each dict with that of __main__, and comparing tensors is an error.
        pickle._Pickler.save_dict(self, items)  # type: ignore[attr-defined]


ClassPickler.dispatch.update(
    {
        _Root: ClassPickler._save_root,
        RawBytes: ClassPickler._save_raw_bytes,
        Namespace: save_namespace,
        GlobalsProxy: save_globals_proxy,
        types.ModuleType: save_module,
        types.FunctionType: save_function,
        types.CodeType: save_code,
        types.CellType: save_cell,
        set: ClassPickler._save_set,
        frozenset: ClassPickler._save_set,
        dict: ClassPickler._save_dict,
    }
)
