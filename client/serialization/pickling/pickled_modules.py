"""Pickling of the author's modules, which are recreated with only the names that the class uses.

Functions of one module still share one globals dict, so `global` statements keep their meaning. The `save_` functions
are handlers of `ClassPickler`.
"""

from __future__ import annotations

import importlib
import io
import sys
import types
from collections.abc import Iterable
from typing import Any

import dill._dill

from logitship.client.errors import ProcessorSerializationError
from logitship.client.serialization.code_names import attribute_chains, global_names, imported_modules
from logitship.client.serialization.provenance import is_own_extension, top_level

from .base_pickler import BasePickler


class Namespace:
    """A module whose functions are pickled by value; in the pickle, a module with the names that are used.

    Attributes:
        name: the module's name.
        variables: its globals here.
        is_new: whether loading creates the module; functions of an installed library use the library's module.
        proxy: placeholder of the globals in the pickle.
        done: names that are in the pickle already.
    """

    def __init__(self, name: str, variables: dict[str, Any], is_new: bool) -> None:
        self.name = name
        self.variables = variables
        self.is_new = is_new
        self.proxy = GlobalsProxy(self)
        self.done = {"__name__"}


class GlobalsProxy:
    """Placeholder of the `__dict__` of a namespace's module."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace


def save_namespace(pickler: BasePickler, namespace: Namespace) -> None:
    """Write the creation of the author's module, or the import of an installed one."""
    create = types.ModuleType if namespace.is_new else importlib.import_module
    pickler.save_reduce(create, (namespace.name,), obj=namespace)


def save_globals_proxy(pickler: BasePickler, proxy: GlobalsProxy) -> None:
    """Write the look-up of a module's globals."""
    pickler.save_reduce(getattr, (proxy.namespace, "__dict__"), obj=proxy)


def save_module(pickler: BasePickler, module: types.ModuleType) -> None:
    """Write an installed module by name."""
    name = module.__name__
    if is_own_extension(name):
        raise pickler.refuse(module, f"your compiled module {name}")
    if pickler.is_own(name):
        fix = "in functions, write 'module.name', or import the names themselves"
        raise pickler.refuse(module, f"your module {name} as a whole", fix)
    pickler.save_reduce(importlib.import_module, (name,), obj=module)


class PickledModules:
    """The namespaces of one pickle, and the imports that they need."""

    def __init__(self, pickler: BasePickler) -> None:
        self._pickler = pickler
        self._namespaces: dict[int, Namespace] = {}
        self._imported: set[str] = set()

    def namespace(self, variables: dict[str, Any]) -> Namespace:
        """Return the namespace of the functions with these globals."""
        if id(variables) not in self._namespaces:
            name = str(variables.get("__name__", "__main__"))
            is_module = getattr(sys.modules.get(name), "__dict__", None) is variables
            is_new = self._pickler.is_own(name) or not is_module
            self._namespaces[id(variables)] = Namespace(name, variables, is_new)
        return self._namespaces[id(variables)]

    def add_globals(self, function: types.FunctionType) -> None:
        """Add the globals that a function uses to its module in the pickle."""
        namespace = self.namespace(function.__globals__)
        if not namespace.is_new:
            return
        self._check_imports(function, namespace)
        for name in sorted(global_names(function.__code__)):
            if name in namespace.variables:
                value = namespace.variables[name]
                with self._pickler.at(f"global {name!r} used by {function.__qualname__}", value):
                    self._add_name(namespace, name, attribute_chains(function.__code__, name))

    def _add_name(self, namespace: Namespace, name: str, chains: Iterable[tuple[str, ...]]) -> None:
        value = namespace.variables[name]
        if isinstance(value, types.ModuleType):
            value = self._add_module(value, chains)
        if name not in namespace.done:
            # One call per name, each before the next value: loading a value may already call functions that use the
            # earlier names, such as the __hash__ of a key.
            namespace.done.add(name)
            self._pickler.call(dill._dill._setitems, namespace.proxy, {name: value})

    def _add_module(self, module: types.ModuleType, chains: Iterable[tuple[str, ...]]) -> Any:
        """Add the used names of a module; return the object that represents the module in the pickle."""
        chains = sorted(chains)
        if not self._pickler.is_own(module.__name__):
            for chain in chains:
                self._import_submodules(module, chain)
            return module
        if () in chains or is_own_extension(module.__name__):
            save_module(self._pickler, module)  # refuses it
        namespace = self.namespace(module.__dict__)
        for name, *rest in chains:
            if name in namespace.variables:
                label = f"{module.__name__}.{name}, in {self._pickler.here()},"
                with self._pickler.at(label, namespace.variables[name]):
                    self._add_name(namespace, name, {tuple(rest)})
        return namespace

    def _import_submodules(self, module: types.ModuleType, chain: tuple[str, ...]) -> None:
        """Pickle the import of a submodule: `import scipy.special` only binds `scipy`."""
        name = module.__name__
        for part in chain:
            if f"{name}.{part}" not in sys.modules:
                break
            name = f"{name}.{part}"
        if name != module.__name__ and name not in self._imported:
            self._imported.add(name)
            self._pickler.call(importlib.import_module, name)

    def _check_imports(self, function: types.FunctionType, namespace: Namespace) -> None:
        package = namespace.variables.get("__package__")
        for name in sorted(imported_modules(function.__code__, package)):
            if name in sys.modules and self._pickler.is_own(name) and top_level(name) != "logitship":
                raise ProcessorSerializationError(
                    f"{function.__qualname__} imports your module {name} when it runs, and the server does not have "
                    "it: import it at the top of the file, so that the names used from it are serialized"
                )


class ModulePickler(BasePickler):
    """Pickler that also writes the author's modules.

    Attributes:
        modules: the author's modules in this pickle.
    """

    def __init__(self, file: io.BytesIO, own_packages: Iterable[str] = ()) -> None:
        super().__init__(file, own_packages)
        self.modules = PickledModules(self)
