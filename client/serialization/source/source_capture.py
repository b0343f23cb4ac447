"""Capture of a class as one self-contained Python module.

Bytecode only runs on the Python minor version that made it; source runs on any. `capture_source` collects the text of
the class and of every helper, base class, constant and import of the author that it uses, from all their modules, into
one text. Values without a literal form (tensors, compiled patterns, sets) are pickled separately.

The result is best effort: there is no source if it would behave differently (two modules use one name for different
things, there is no source file, a statement gives another value when it runs again).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import math
import sys
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any

from logitship.client.errors import ProcessorSerializationError
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.code_names import attribute_chains, code_names, eager_names, functions_of
from logitship.client.serialization.processor_string import PYTHON, Listing, SourceProcessor
from logitship.client.serialization.provenance import is_installed, top_level

from .source_layout import HEADER, NoSource, Part, compile_source, listing, module_text
from .source_text import (
    Definition,
    Scope,
    SourceFile,
    files_of_module,
    find_class,
    find_function,
    scope_of,
    source_file,
)

_WRAPS = "_wraps"
"""Attribute of a class that a function made: the name of the attribute with the class or object that it wraps."""

_WRAPPED_OBJECT = "WRAPPED"
_REDUCTIONS = ("__reduce__", "__reduce_ex__")

_MAX_INT_BITS = 2048
"""Longest literal integer. Python refuses to write or read more than 640 digits if it is told to, 4,300 by default."""


def capture_source(
    cls: type, own_packages: frozenset[str] = frozenset(), *, artifact_size: int | None = None
) -> tuple[SourceProcessor | None, Listing | None]:
    """Return the source of the class and everything it uses, and the lines of it for tracebacks.

    The source is None if it would behave differently, the lines are None if they cannot be read.

    Args:
        cls: the class.
        own_packages: see `ClassPickler`.
        artifact_size: see `ClassPickler`.
    """
    if "_pickles_as" in cls.__dict__:
        return None, None
    builder = _ModuleBuilder(own_packages, artifact_size)
    try:
        builder.add_object(cls.__name__, cls)
        text, ranges = module_text(builder.parts, builder.imports)
        source = SourceProcessor(text, cls.__name__, *builder.captured())
    except (NoSource, RecursionError):
        text, ranges = listing(builder.parts)
        return None, Listing(text, ranges) if ranges else None
    from .source_check import is_equivalent

    lines = Listing(text, ranges) if ranges else None
    return source if is_equivalent(source, builder.values, own_packages) else None, lines


class _ModuleBuilder:
    """Builder of the module's parts.

    Attributes:
        values: the author's value of each name in it.
        parts: its statements, by the name they bind.
        imports: its import statements.
    """

    def __init__(self, own_packages: frozenset[str], artifact_size: int | None) -> None:
        self._own_packages = own_packages
        self._artifact_size = artifact_size
        self.values: dict[str, Any] = {}
        self.imports: set[str] = set()
        self.parts: dict[str, Part] = {}
        self._captured: dict[str, Any] = {}
        self._files: dict[str, SourceFile | None] = {}

    # --- the result ---

    def captured(self) -> tuple[bytes, str, tuple[Artifact, ...]]:
        """Return the values that are pickled, the version of Python, and the artifacts that they refer to."""
        if not self._captured:
            return b"", PYTHON, ()
        captured, artifacts = self._pickle_data(self._captured)
        return captured, PYTHON, artifacts

    # --- adding ---

    def _claim(self, name: str, value: Any) -> bool:
        """Reserve a name; return False if it is already there with the same value."""
        if name not in self.values:
            self.values[name] = value
            return True
        known = self.values[name]
        if known is value or (_is_literal(known) and _is_literal(value) and repr(known) == repr(value)):
            return False
        raise NoSource

    def _add_global(self, name: str, scope: Scope) -> None:
        """Add a module-level name of the author's module."""
        value = scope.variables[name]
        if not self._claim(name, value):
            return
        if isinstance(value, ModuleType):
            return self._import_module(name, value)
        if self._import_by_name(name, value):
            return None
        file, statement = self._binding(name, value, scope.variables)
        match statement:
            case ast.ImportFrom():
                self._follow_import(name, value, statement, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                assert file is not None
                self._add_definition(name, value, file, statement)
            case _:
                self._add_value(name, value, file, statement, scope)
        return None

    def add_object(self, name: str, value: Any) -> None:
        """Add an object without a module-level name: the processor, or a variable of an enclosing function."""
        if not self._claim(name, value):
            return
        if isinstance(value, ModuleType):
            self._import_module(name, value)
        elif self._import_by_name(name, value):
            return
        elif isinstance(value, type) and _WRAPS in vars(value):
            self._add_wrapper(name, value)
        elif isinstance(value, type | FunctionType):
            file, node = self._definition(value)
            self._add_definition(name, value, file, node)
        else:
            self._add_value(name, value, None, None, Scope({}))

    def _add_wrapper(self, name: str, cls: type) -> None:
        """Add a class that a function made around another class, or around an object of one, and named after it.

        Its statement takes the name over from the other class, which therefore must not use it itself.
        """
        from logitship.client.serialization.pickling.pickled_classes import pickled_attributes

        attributes = pickled_attributes(cls)
        attribute: str = attributes[_WRAPS]
        wrapped = attributes.pop(attribute)
        original, key = wrapped if isinstance(wrapped, type) else type(wrapped), f"class {name}"
        if original.__name__ != name or not all(map(_is_literal, attributes.values())):
            raise NoSource
        if not self._import_by_name(name, original):
            file, node = self._definition(original)
            self._add_text(key, file, node, scope_of(original, node, file.filename))
        if original is not wrapped:
            self._claim(_WRAPPED_OBJECT, wrapped)
            self._add_instance(_WRAPPED_OBJECT, wrapped, key)
        (base,) = cls.__bases__
        self.add_object(base.__name__, base)
        values = {each: repr(value) for each, value in attributes.items()}
        values["__doc__"] = f"{name}.__doc__"
        values[attribute] = name if original is wrapped else _WRAPPED_OBJECT
        body = "".join(f"\n    {each} = {value}" for each, value in values.items())
        self.parts[name] = Part(f"class {name}({base.__name__}):{body}", {base.__name__, key, _WRAPPED_OBJECT})

    def _add_instance(self, name: str, value: Any, of_class: str) -> None:
        """Add an object: pickled, or of a class of the author, which is created without its constructor.

        Args:
            name: the name that its statement binds.
            value: the object.
            of_class: key of its class in `parts`.
        """
        cls = type(value)
        if self._is_data(name, value):
            self._captured[name] = value
        elif isinstance(value, list) and not self._is_own(cls.__module__):
            items = [f"{name}_{index}" for index in range(len(value))]
            for item_name, item in zip(items, value, strict=True):
                self.add_object(type(item).__name__, type(item))
                self._claim(item_name, item)
                self._add_instance(item_name, item, type(item).__name__)
            self.parts[name] = Part(f"{name} = {cls.__name__}([{', '.join(items)}])", {of_class, *items})
        elif hasattr(value, "__dict__") and all(getattr(cls, each) is getattr(object, each) for each in _REDUCTIONS):
            attributes = f"{name}_ATTRIBUTES"
            self._claim(attributes, vars(value))
            self._add_value(attributes, vars(value), None, None, Scope({}))
            text = f"{name} = object.__new__({cls.__name__})\nvars({name}).update({attributes})"
            self.parts[name] = Part(text, {of_class, attributes})
        else:
            raise NoSource

    def _add_definition(self, name: str, value: Any, file: SourceFile, node: Definition) -> None:
        self._add_text(name, file, node, scope_of(value, node, file.filename))
        if isinstance(node, ast.ClassDef):
            self._add_annotations(node, scope_of(value, node, file.filename))
        if node.name != name:
            self._claim(node.name, value)
            self.parts[node.name] = self.parts.pop(name)
            self.parts[name] = Part(f"{name} = {node.name}", eager={node.name})

    def _add_value(
        self, name: str, value: Any, file: SourceFile | None, statement: ast.stmt | None, scope: Scope
    ) -> None:
        """Add a constant: as a literal, else pickled, else by the statement that made it."""
        if _is_literal(value):
            self.parts[name] = Part(f"{name} = {value!r}")
        elif self._is_data(name, value):
            self._captured[name] = value
        elif file is not None and isinstance(statement, ast.Assign | ast.AnnAssign):
            self._add_text(name, file, statement, scope)
        elif isinstance(value, type | FunctionType):
            own_file, node = self._definition(value)
            self._add_definition(name, value, own_file, node)
        else:
            raise NoSource

    def _add_text(self, name: str, file: SourceFile, node: ast.stmt, scope: Scope) -> None:
        """Add a statement and everything it uses."""
        text = file.text_of(node)
        code = compile_source(HEADER + text)
        eager, every = eager_names(code) - {name}, code_names(code) - {name}
        self.parts[name] = Part(text, eager, every - eager, file.origin_of(node))
        for used in sorted(every):
            if used in scope.local:
                self.add_object(used, scope.local[used])
            elif used in scope.variables:
                self._add_global(used, scope)
            elif used in eager and not hasattr(builtins, used):
                raise NoSource
        for used in sorted(every):
            if isinstance(self.values.get(used), ModuleType):
                self._import_submodules(used, code)

    def _add_annotations(self, node: ast.ClassDef, scope: Scope) -> None:
        """Import the names that `dataclasses` looks for in annotations (`ClassVar`, `InitVar`), which are text here."""
        annotations = [inner.annotation for inner in node.body if isinstance(inner, ast.AnnAssign)]
        names = {n.id for a in annotations for n in ast.walk(a) if isinstance(n, ast.Name)}
        for name in sorted(names - self.values.keys()):
            value = scope.variables.get(name)
            if isinstance(value, ModuleType) and not self._is_own(value.__name__):
                self._claim(name, value)
                self._import_module(name, value)
            elif self._import_by_name(name, value):
                self._claim(name, value)

    # --- imports ---

    def _import_module(self, name: str, module: ModuleType) -> None:
        if self._is_own(module.__name__):
            raise NoSource
        self.imports.add(f"import {module.__name__}" + ("" if module.__name__ == name else f" as {name}"))

    def _import_submodules(self, name: str, code: CodeType) -> None:
        module = self.values[name]
        for chain in attribute_chains(code, name):
            path = module.__name__
            for part in chain:
                if f"{path}.{part}" not in sys.modules:
                    break
                path = f"{path}.{part}"
            if module.__name__ == name != path:
                self.imports.add(f"import {path}")

    def _import_by_name(self, name: str, value: Any) -> bool:
        """Import a class or function of an installed library by name; return False for all others."""
        if "_pickles_as" in getattr(value, "__dict__", ()) and isinstance(value, type):
            module, qualname = value.__dict__["_pickles_as"]
        else:
            module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if not isinstance(module, str) or not isinstance(qualname, str) or self._is_own(module):
                return False
            if getattr(sys.modules.get(module), qualname, None) is not value:
                return False
        if module != "builtins" or name != qualname:
            self.imports.add(f"from {module} import {qualname}" + ("" if qualname == name else f" as {name}"))
        return True

    def _follow_import(self, name: str, value: Any, statement: ast.ImportFrom, scope: Scope) -> None:
        """Keep `from library import name`; for an import from the author's own module, add the original."""
        original = next(a.name for a in statement.names if (a.asname or a.name) == name)
        relative = "." * statement.level + (statement.module or "")
        package = scope.variables.get("__package__")
        module_name = resolve_name(relative, package) if statement.level else relative
        module = sys.modules.get(module_name)
        if getattr(module, original, None) is not value or module is None:
            raise NoSource
        if not self._is_own(module_name):
            self.imports.add(f"from {module_name} import {original}" + ("" if original == name else f" as {name}"))
        elif original not in vars(module):  # the module's `__getattr__` found it
            del self.values[name]
            self.add_object(name, value)
        elif original == name:
            del self.values[name]
            self._add_global(name, Scope(vars(module)))
        else:
            self._add_global(original, Scope(vars(module)))
            self.parts[name] = Part(f"{name} = {original}", eager={original})

    def _is_own(self, module: str) -> bool:
        return not is_installed(module) or top_level(module) in self._own_packages

    # --- finding ---

    def _file(self, filename: str, variables: dict[str, Any]) -> SourceFile | None:
        if filename not in self._files:
            self._files[filename] = source_file(filename, variables)
        return self._files[filename]

    def _binding(
        self, name: str, value: Any, variables: dict[str, Any]
    ) -> tuple[SourceFile, ast.stmt] | tuple[None, None]:
        """Return the last module-level statement that bound the name, and its file."""
        own = [value.__code__.co_filename] if isinstance(value, FunctionType) and value.__globals__ is variables else []
        found: list[tuple[SourceFile, ast.stmt]] = []
        for filename in [*files_of_module(variables), *own]:
            file = self._file(filename, variables)
            found += [(file, statement) for statement in file.bindings(name)] if file else []
        return found[-1] if found else (None, None)

    def _definition(self, value: type | FunctionType) -> tuple[SourceFile, Definition]:
        for function in functions_of(value) if isinstance(value, type) else [inspect.unwrap(value)]:
            file = self._file(function.__code__.co_filename, function.__globals__)
            node: Definition | None = None
            if file is not None:
                node = find_class(file, value) if isinstance(value, type) else find_function(file, function.__code__)
            if file is not None and node is not None:
                return file, node
        if isinstance(value, type) and (module := sys.modules.get(value.__module__)):
            for filename in files_of_module(vars(module)):
                file = self._file(filename, vars(module))
                node = find_class(file, value) if file else None
                if file is not None and node is not None:
                    return file, node
        raise NoSource

    # --- values ---

    def _is_data(self, name: str, value: Any) -> bool:
        try:
            self._pickle_data({name: value})
        except ProcessorSerializationError:
            return False
        return True

    def _pickle_data(self, values: dict[str, Any]) -> tuple[bytes, tuple[Artifact, ...]]:
        from logitship.client.serialization.pickling.class_pickler import ClassPickler

        file = io.BytesIO()
        pickler = ClassPickler(file, self._own_packages, artifact_size=self._artifact_size)
        pickler.dump_data(values)
        return file.getvalue(), tuple(pickler.artifacts.values())


def _is_literal(value: Any) -> bool:
    """Return whether `repr` of the value is Python that recreates it."""
    if type(value) in (list, tuple):
        return all(map(_is_literal, value))
    if type(value) is dict:
        return all(map(_is_literal, value)) and all(map(_is_literal, value.values()))
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return value.bit_length() <= _MAX_INT_BITS
    return value is None or type(value) in (bool, str, bytes)
