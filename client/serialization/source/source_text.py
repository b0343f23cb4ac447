"""Source text that defined a function, a class or a module-level name, and the scope of its names."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from logitship.client.serialization.code_names import captured_values, functions_in, functions_of
from logitship.client.serialization.syntax import parse

from .source_layout import NoSource

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class SourceFile:
    """A parsed file, or a cell of a notebook.

    Attributes:
        filename: its name in code objects.
        lines: its lines.
        tree: its syntax tree.
    """

    filename: str
    lines: list[str]
    tree: ast.Module

    def text_of(self, node: ast.stmt) -> str:
        """Return the text of a statement with its decorators, without its indentation."""
        if self.origin_of(node) is None:
            return ast.unparse(node)
        return textwrap.dedent("".join(self.lines[_first_line(node) - 1 : node.end_lineno])).rstrip()

    def origin_of(self, node: ast.stmt) -> tuple[str, int] | None:
        """Return the name of the file, and the line where the statement begins; None if `text_of` has other lines."""
        # Removing the indentation also changes multi-line strings.
        if node.col_offset and any(_is_long_string(inner) for inner in ast.walk(node)):
            return None
        return PurePath(self.filename).name, _first_line(node)

    def definitions(self) -> Iterator[tuple[str, Definition]]:
        """Yield every function and class with its qualified name."""
        yield from _definitions(self.tree, "")

    def bindings(self, name: str) -> Iterator[ast.stmt]:
        """Yield the module-level statements that bind a name, in order, also those inside `if` and `try`."""
        yield from (statement for statement in _module_level(self.tree) if name in _bound_names(statement))


def source_file(filename: str, variables: dict[str, Any]) -> SourceFile | None:
    """Return the file from `linecache` (notebooks put their cells there), or None."""
    linecache.checkcache(filename)
    lines = linecache.getlines(filename, variables)
    if not lines:
        return None
    try:
        return SourceFile(filename, lines, parse("".join(lines)))
    except SyntaxError:  # a notebook cell may contain IPython syntax
        return None


def files_of_module(variables: dict[str, Any]) -> list[str]:
    """Return the files that a module's code comes from: one, or the cells of a notebook."""
    if isinstance(variables.get("__file__"), str):
        return [variables["__file__"]]
    codes: list[CodeType] = []
    for value in list(variables.values()):
        functions = functions_of(value) if isinstance(value, type) else functions_in(value)
        codes += [f.__code__ for f in functions if f.__globals__ is variables]
    return list(dict.fromkeys(code.co_filename for code in codes))


def find_function(file: SourceFile, code: CodeType) -> Definition | None:
    """Return the `def` that a code object was compiled from."""
    for _, node in file.definitions():
        if node.name == code.co_name and _first_line(node) == code.co_firstlineno:
            return node
    return None


def find_class(file: SourceFile, cls: type) -> ast.ClassDef | None:
    """Return the `class` statement of a class: the one around its methods, else the last with its name."""
    nodes = [n for qualname, n in file.definitions() if isinstance(n, ast.ClassDef) and qualname == cls.__qualname__]
    lines = {f.__code__.co_firstlineno for f in functions_of(cls) if f.__code__.co_filename == file.filename}
    around = [node for node in nodes if any(node.lineno <= line <= (node.end_lineno or 0) for line in lines)]
    nodes = around or nodes
    return nodes[-1] if nodes else None


@dataclass
class Scope:
    """Variables that a piece of source text can use.

    Attributes:
        variables: the module's globals.
        local: variables of an enclosing function that the text uses.
    """

    variables: dict[str, Any]
    local: dict[str, Any] = field(default_factory=dict)


def scope_of(value: Any, node: Definition, filename: str) -> Scope:
    """Return the scope of the text of a function or class."""
    if not isinstance(value, type):
        function: Any = inspect.unwrap(value)
        return Scope(
            getattr(function, "__globals__", {}),
            captured_values(function) if isinstance(function, FunctionType) else {},
        )
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    functions = [inspect.unwrap(function) for function in functions_of(value)]
    written = [f for f in functions if f.__code__.co_filename == filename and f.__code__.co_firstlineno in lines]
    local = {base.__name__: base for base in value.__bases__}
    for function in written:
        for name, captured in captured_values(function).items():
            if local.setdefault(name, captured) is not captured:
                raise NoSource
    local.pop("__class__", None)
    variables = written[0].__globals__ if written else vars(sys.modules.get(value.__module__, ModuleType("")))
    return Scope(variables, {name: v for name, v in local.items() if variables.get(name) is not v})


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _is_long_string(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Constant(value=str() | bytes()):
            return node.lineno != node.end_lineno
    return False


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, _DEFINITIONS):
            yield prefix + node.name, node
            inner = "." if isinstance(node, ast.ClassDef) else ".<locals>."
            yield from _definitions(node, prefix + node.name + inner)
        else:
            yield from _definitions(node, prefix)


def _module_level(parent: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, (*_DEFINITIONS, ast.expr)):
            yield from _module_level(node)


def _bound_names(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
        case ast.Assign():
            nodes = [node for target in statement.targets for node in ast.walk(target)]
            return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AugAssign(target=ast.Name(id=name)):
            return {name}
    return set()
