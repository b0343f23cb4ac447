"""Pickle a class by value, for any `dill.loads`.

`dill.dumps` sends a class by reference if its module can be imported *here*, and ties the functions of a script to the
`__main__` of the process that loads them. This pickler writes with dill's constructors, so that dill alone reads it,
but decides differently:

- What the author wrote travels by value; what is installed travels by name (`provenance.py`).
- The modules of the author become empty modules that hold only the names which the class uses. Functions of one module
  still share one globals dict, so `global` statements keep their meaning.
- A class is created bare, then its attributes are set: it may refer to itself anywhere. What `__init_subclass__`,
  `__set_name__` or a metaclass of the author's did to it is already in its attributes, so none of them runs again.
- Annotations travel as text: nothing runs them.
- The same class gives the same bytes in every process: sets are sorted, equal strings are one object, and file names
  lose their folders.

This module imports dill; `serialization.py` imports it when a class is really serialized.
"""

from __future__ import annotations

import abc
import enum
import functools
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

import dill._dill

from .code_names import attribute_chains, global_names, imported_modules
from .errors import ProcessorSerializationError
from .provenance import is_installed, is_own_extension, top_level
from .reductions import (
    annotations_as_text,
    is_written_in_enum,
    ordered,
    reduce_type_variable,
    reduce_value,
    sentinel_name,
    slot_names,
    untravellable,
)

PROTOCOL = 4

# Attributes that creating the class makes anew, or that only describe where it was written.
_NOT_CARRIED = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__module__",
        "__qualname__",
        "__slots__",
        "__orig_bases__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__classdictcell__",
        "__static_attributes__",
        "__firstlineno__",
        "__abstractmethods__",
        "_abc_impl",
    }
)


class _Dispatch(dict[type, Any]):
    """Our handlers, then dill's. Every class whose type is a metaclass is saved as a class."""

    def get(self, key: type, default: Any = None) -> Any:
        if key in self:
            return self[key]
        if issubclass(key, type):
            return ClassPickler.save_class
        return dill._dill.Pickler.dispatch.get(key, default)


class _Root:
    """The class to pickle. Saving it saves the class, then finishes what must come last."""

    def __init__(self, cls: type) -> None:
        self.cls = cls


class _Namespace:
    """A module whose functions travel by value; in the pickle, a module with the names that are used.

    Attributes:
        name: the module's name.
        variables: its globals here.
        carried: whether it becomes a new module; the functions of an installed library keep the library's own.
        proxy: stands for the globals in the pickle.
        done: names that are in the pickle already.
    """

    def __init__(self, name: str, variables: dict[str, Any], carried: bool) -> None:
        self.name = name
        self.variables = variables
        self.carried = carried
        self.proxy = _Globals(self)
        self.done = {"__name__"}


class _Globals:
    """Stands for the `__dict__` of a namespace's module."""

    def __init__(self, namespace: _Namespace) -> None:
        self.namespace = namespace


class ClassPickler(dill._dill.Pickler):  # type: ignore[misc]
    """Writes one class, and all that it uses, to a file.

    Raises:
        ProcessorSerializationError: from `dump_class`; names the object that cannot travel and where it is used.
    """

    dispatch: ClassVar[_Dispatch] = _Dispatch()

    def __init__(self, file: io.BytesIO, own_packages: Iterable[str] = ()) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._own_packages = frozenset(own_packages)
        self._namespaces: dict[int, _Namespace] = {}
        self._imported: set[str] = set()
        self._canonical: dict[Any, Any] = {}
        self._path: list[tuple[str, Any]] = []
        self._deferred: list[tuple[Any, ...]] = []
        self._data_only = False

    def dump_class(self, cls: type) -> None:
        """Pickle `cls` by value."""
        self._dump(_Root(cls))

    def dump_data(self, values: dict[str, Any]) -> None:
        """Pickle values that hold no code of the author's: no bytecode, so any Python version reads them.

        Raises:
            ProcessorSerializationError: they hold some, or something that cannot travel.
        """
        self._data_only = True
        self._dump(values)

    def _dump(self, root: Any) -> None:
        try:
            self.dump(root)
        except ProcessorSerializationError:
            raise
        except RecursionError as error:
            raise ProcessorSerializationError(f"{self._here()} is nested too deeply to travel") from error
        except Exception as error:  # __reduce__ and __getstate__ are the author's code
            raise ProcessorSerializationError(
                f"{self._here()} cannot travel: {type(error).__name__}: {error}"
            ) from error

    # --- where we are, for messages ---

    @contextmanager
    def _at(self, label: str, value: Any) -> Iterator[None]:
        self._path.append((label, value))
        yield
        self._path.pop()  # not on an error: dump_class still needs it

    def _here(self) -> str:
        return self._path[-1][0] if self._path else "the class"

    def _refuse(self, value: Any, what: str, mend: str = "") -> ProcessorSerializationError:
        verb = "is" if self._path and self._path[-1][1] is value else "holds"
        message = f"{self._here()} {verb} {what}, which cannot travel"
        return ProcessorSerializationError(f"{message}: {mend}" if mend else message)

    def _is_own(self, module_name: str | None) -> bool:
        return not is_installed(module_name) or top_level(module_name or "") in self._own_packages

    # --- writing ---

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
        """Objects that pickle and dill would write in a way that does not mean the same elsewhere."""
        if what := untravellable(obj):
            raise self._refuse(obj, what)
        if name := sentinel_name(obj):
            return name
        if isinstance(obj, TypeVar) and self._is_own(obj.__module__):
            return reduce_type_variable(obj)
        return reduce_value(obj)

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        """Write a call for its effect."""
        self.save_reduce(function, args)
        self.write(pickle.POP)

    def _save_root(self, root: _Root) -> None:
        with self._at(f"class {root.cls.__qualname__}", root.cls):
            self.save_class(root.cls)
        for call in self._deferred:
            self._call(*call)

    def _save_name(self, obj: Any, module: str, qualname: str) -> None:
        self.save(module)
        self.save(qualname)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write an object by name, which must be an installed library's."""
        module = getattr(obj, "__module__", None)
        if module is None:
            module = pickle.whichmodule(obj, name or obj.__name__)  # type: ignore[attr-defined]
        if is_own_extension(module):
            raise self._refuse(obj, f"{name or obj!r} of your compiled module {module}")
        if self._is_own(module):
            raise self._refuse(obj, f"{name or obj!r}, known only by its name in your module {module}")
        super().save_global(obj, name)

    # --- modules ---

    def save_module(self, module: types.ModuleType) -> None:
        """Write an installed module by name."""
        name = module.__name__
        if is_own_extension(name):
            raise self._refuse(module, f"your compiled module {name}")
        if self._is_own(name):
            mend = "in a function, use what you need of it as 'module.name', or import the names themselves"
            raise self._refuse(module, f"your module {name} as a whole", mend)
        self.save_reduce(importlib.import_module, (name,), obj=module)

    def _save_namespace(self, namespace: _Namespace) -> None:
        create = types.ModuleType if namespace.carried else importlib.import_module
        self.save_reduce(create, (namespace.name,), obj=namespace)

    def _save_globals(self, proxy: _Globals) -> None:
        self.save_reduce(getattr, (proxy.namespace, "__dict__"), obj=proxy)

    def _namespace(self, variables: dict[str, Any]) -> _Namespace:
        if id(variables) not in self._namespaces:
            name = str(variables.get("__name__", "__main__"))
            is_module = getattr(sys.modules.get(name), "__dict__", None) is variables
            self._namespaces[id(variables)] = _Namespace(name, variables, carried=self._is_own(name) or not is_module)
        return self._namespaces[id(variables)]

    def _carry_globals(self, function: types.FunctionType) -> None:
        """Put the globals that a function uses into its module in the pickle."""
        namespace = self._namespace(function.__globals__)
        if not namespace.carried:
            return
        self._check_imports(function, namespace)
        for name in sorted(global_names(function.__code__)):
            if name in namespace.variables:
                value = namespace.variables[name]
                with self._at(f"global {name!r} used by {function.__qualname__}", value):
                    self._carry(namespace, name, attribute_chains(function.__code__, name))

    def _carry(self, namespace: _Namespace, name: str, chains: Iterable[tuple[str, ...]]) -> None:
        value = namespace.variables[name]
        if isinstance(value, types.ModuleType):
            value = self._carry_module(value, chains)
        if name not in namespace.done:
            # One call a name, each before the next value: loading a value may already call functions that use the
            # names before it, such as the __hash__ of a key.
            namespace.done.add(name)
            self._call(dill._dill._setitems, namespace.proxy, {name: value})

    def _carry_module(self, module: types.ModuleType, chains: Iterable[tuple[str, ...]]) -> Any:
        """Carry what is used of a module; gives what stands for the module in the pickle."""
        chains = sorted(chains)
        if not self._is_own(module.__name__):
            for chain in chains:
                self._import_submodules(module, chain)
            return module
        if () in chains or is_own_extension(module.__name__):
            return module  # save_module refuses it
        namespace = self._namespace(module.__dict__)
        for name, *rest in chains:
            if name in namespace.variables:
                with self._at(f"{module.__name__}.{name}, in {self._here()},", namespace.variables[name]):
                    self._carry(namespace, name, {tuple(rest)})
        return namespace

    def _import_submodules(self, module: types.ModuleType, chain: tuple[str, ...]) -> None:
        """`import scipy.special` binds `scipy`: the import of the submodule must travel too."""
        name = module.__name__
        for part in chain:
            if f"{name}.{part}" not in sys.modules:
                break
            name = f"{name}.{part}"
        if name != module.__name__ and name not in self._imported:
            self._imported.add(name)
            self._call(importlib.import_module, name)

    def _check_imports(self, function: types.FunctionType, namespace: _Namespace) -> None:
        package = namespace.variables.get("__package__")
        for name in sorted(imported_modules(function.__code__, package)):
            if name in sys.modules and self._is_own(name) and top_level(name) != "logitship":
                raise ProcessorSerializationError(
                    f"{function.__qualname__} imports your module {name} when it runs, and the server does not have "
                    "it: import it at the top of the file, so that what is used of it can travel"
                )

    # --- functions ---

    def _check_code_allowed(self, obj: Any) -> None:
        if self._data_only:
            raise self._refuse(obj, "code")

    def save_function(self, function: types.FunctionType) -> None:
        """Write a function: created bare, then filled, so that it may refer to itself anywhere."""
        if self._by_name(function):
            self.save_global(function)
            return
        self._check_code_allowed(function)
        namespace = self._namespace(function.__globals__)
        cells = function.__closure__ or ()
        new_cells = [
            (n, c) for n, c in zip(function.__code__.co_freevars, cells, strict=True) if id(c) not in self.memo
        ]
        create = (function.__code__, namespace.proxy, function.__name__, None, function.__closure__)
        self.save_reduce(dill._dill._create_function, create, obj=function)
        for name, cell in new_cells:
            self._fill_cell(function, name, cell)
        self._carry_globals(function)
        self._set_function_attributes(function)

    def _fill_cell(self, function: types.FunctionType, name: str, cell: types.CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        with self._at(f"variable {name!r} captured by {function.__qualname__}", value):
            self._call(setattr, cell, "cell_contents", value)

    def _set_function_attributes(self, function: types.FunctionType) -> None:
        attributes: dict[str, Any] = {
            "__qualname__": function.__qualname__,
            "__module__": function.__module__,
            "__doc__": function.__doc__,
            "__annotations__": annotations_as_text(function),
        }
        self.save((None, {name: value for name, value in attributes.items() if value}))
        self.write(pickle.BUILD)
        for name in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, name)
            if value:
                with self._at(f"a default argument of {function.__qualname__}", value):
                    self._call(setattr, function, name, value)
        for name, value in function.__dict__.items():
            with self._at(f"attribute {name!r} of function {function.__qualname__}", value):
                self._call(setattr, function, name, value)

    def save_code(self, code: types.CodeType) -> None:
        """Write a code object without the folder of its file."""
        args = (
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_nlocals,
            code.co_stacksize,
            code.co_flags,
            code.co_code,
            code.co_consts,
            code.co_names,
            code.co_varnames,
            PurePath(code.co_filename).name,
            code.co_name,
            code.co_qualname,
            code.co_firstlineno,
            code.co_linetable,
            code.co_exceptiontable,
            code.co_freevars,
            code.co_cellvars,
        )
        self.save_reduce(dill._dill._create_code, args, obj=code)

    def save_cell(self, cell: types.CellType) -> None:
        """Write an empty cell: `_fill_cell` fills it when its function exists, which may be what it holds."""
        self.save_reduce(types.CellType, (), obj=cell)

    # --- classes ---

    def save_class(self, cls: type) -> None:
        """Write a class: by name if it is installed, else by value."""
        if "_pickles_as" in cls.__dict__ and top_level(cls.__module__) == "logitship":
            module, qualname = cls.__dict__["_pickles_as"]
            self._save_name(cls, module, qualname)
        elif self._by_name(cls) and not self._is_root(cls):
            self.save_global(cls)
        elif cls in dill._dill._typemap:
            self.save_reduce(dill._dill._load_type, (dill._dill._typemap[cls],), obj=cls)
        elif is_own_extension(cls.__module__):
            raise self._refuse(cls, f"class {cls.__qualname__} of your compiled module {cls.__module__}")
        else:
            self._check_code_allowed(cls)
            if isinstance(cls, enum.EnumMeta):
                self._save_enum(cls)
            else:
                self._save_plain_class(cls)

    def _is_root(self, cls: type) -> bool:
        return bool(self._path) and self._path[0][1] is cls

    def _save_plain_class(self, cls: type) -> None:
        meta = type(cls)
        bare = {name: cls.__dict__[name] for name in ("__slots__", "__orig_bases__") if name in cls.__dict__}
        bare["__module__"] = cls.__module__
        bare["__qualname__"] = cls.__qualname__
        if self._by_name(meta):
            self.save_reduce(dill._dill._create_type, (meta, cls.__name__, cls.__bases__, bare), obj=cls)
        else:
            installed = next(base for base in type.mro(meta) if self._by_name(base))
            self.save_reduce(installed.__new__, (meta, cls.__name__, cls.__bases__, bare), obj=cls)
        slots = slot_names(cls)
        self._set_class_attributes(
            cls, {n: v for n, v in cls.__dict__.items() if n not in _NOT_CARRIED and n not in slots}
        )
        if isinstance(cls, abc.ABCMeta):
            self._call(setattr, cls, "__abstractmethods__", cls.__abstractmethods__)
            registered = [ref() for ref in dill._dill.abc._get_dump(cls)[0]]
            for other in sorted(filter(None, registered), key=lambda other: (other.__module__, other.__qualname__)):
                self._call(abc.ABCMeta.register, cls, other)

    def _set_class_attributes(self, cls: type, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            inner = getattr(value, "__func__", value)
            label = "" if isinstance(inner, types.FunctionType) else f"attribute {name!r} of class {cls.__qualname__}"
            with self._at(label or f"{cls.__qualname__}.{name}", value):
                if name == "__init_subclass__":
                    self._deferred.append((type.__setattr__, cls, name, value))
                else:
                    self._call(type.__setattr__, cls, name, value)
        annotations = annotations_as_text(cls)
        if annotations:
            self._call(type.__setattr__, cls, "__annotations__", annotations)

    def _save_enum(self, cls: enum.EnumMeta) -> None:
        """Have `enum` build the class anew from its members' values, then add the methods."""
        new = getattr(cls.__dict__.get("__new_member__"), "__func__", cls.__dict__.get("__new_member__"))
        if isinstance(new, types.FunctionType) and new.__module__ != "enum":
            raise self._refuse(cls, f"enum {cls.__qualname__} with a __new__ of its own", "give it plain values")
        own = {n: v for n, v in cls.__dict__.items() if is_written_in_enum(n, v)}
        members: dict[str, Any] = {name: member.value for name, member in dict[str, Any](cls.__members__).items()}
        body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        body |= {name: own.pop(name) for name in ("__init__", "_missing_", "_ignore_") if name in own}
        fill = functools.partial(dill._dill._setitems, source=body | members)
        self.save_reduce(types.new_class, (cls.__name__, cls.__bases__, {"metaclass": type(cls)}, fill), obj=cls)
        self._set_class_attributes(cls, own)

    def _by_name(self, obj: Any) -> bool:
        """True if an installed library has this very object under the object's own name."""
        module = getattr(obj, "__module__", None)
        if self._is_own(module):
            return False
        found: Any = sys.modules.get(str(module))
        for part in obj.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is obj

    # --- containers ---

    def save_set(self, items: set[Any] | frozenset[Any]) -> None:
        """Write a set in an order that does not depend on the process."""
        self.save_reduce(type(items), (ordered(items),), obj=items)

    def save_dict(self, items: dict[Any, Any]) -> None:
        """Write a dict that is not a module's globals."""
        module = sys.modules.get(items["__name__"]) if isinstance(items.get("__name__"), str) else None
        if module is not None and module.__dict__ is items:
            raise self._refuse(items, f"the globals() of module {module.__name__}")
        # pickle's own: dill's compares each dict with that of __main__, and comparing tensors is an error.
        pickle._Pickler.save_dict(self, items)  # type: ignore[attr-defined]


ClassPickler.dispatch.update(
    {
        _Root: ClassPickler._save_root,
        _Namespace: ClassPickler._save_namespace,
        _Globals: ClassPickler._save_globals,
        types.ModuleType: ClassPickler.save_module,
        types.FunctionType: ClassPickler.save_function,
        types.CodeType: ClassPickler.save_code,
        types.CellType: ClassPickler.save_cell,
        set: ClassPickler.save_set,
        frozenset: ClassPickler.save_set,
        dict: ClassPickler.save_dict,
    }
)
