"""Rewrites of loops over rows: one write for all rows after the loop, instead of one for each row in it.

A rewrite is only suggested after it was run: `rewritten_call` compiles the author's method with it, and the caller
compares the logits. So a candidate may be wrong for the types that the author uses; what is printed is right.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Write: TypeAlias = ast.Assign | ast.AugAssign

OUTSIDE_CLASS = "__"
"""A class name that leaves the names that begin with two underscores as they are."""

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}


@dataclass(frozen=True)
class Rewrite:
    """Statements that replace one write in a loop.

    Attributes:
        line: line number of the write.
        before: statements before the loop.
        instead: statements instead of the write.
        after: statements after the loop.
    """

    line: int
    before: str
    instead: str
    after: str

    def text(self) -> str:
        """Return the statements with their places. Code is indented."""
        parts = (
            ("Before the loop:", self.before),
            (f"In the loop, instead of line {self.line}:", self.instead),
            ("After the loop:", self.after),
        )
        return "\n".join(f"{title}\n" + _indented(code) for title, code in parts)


@dataclass(frozen=True)
class RowLoopCode:
    """A loop over rows and the method around it.

    Attributes:
        class_name: name of the class that defines the method; `OUTSIDE_CLASS` if it is defined outside.
        function: the method.
        loop: the loop.
        logits: name of the method's logits.
    """

    class_name: str
    function: ast.FunctionDef
    loop: ast.For
    logits: str


def candidates(code: RowLoopCode) -> Iterator[Rewrite]:
    """Yield rewrites of the only write of a loop, the fastest first; none if it cannot be moved behind the loop."""
    write = _only_write(code)
    if write is None or not _can_be_delayed(code, write):
        return
    target = write.target if isinstance(write, ast.AugAssign) else write.targets[0]
    assert isinstance(target, ast.Subscript)
    draft = _Draft(code, write)
    match target.slice:
        case ast.Tuple(elts=[row, columns]):
            yield from draft.of_columns(ast.unparse(row), columns)
        case ast.Tuple():
            return
        case row:
            yield from draft.of_rows(ast.unparse(row), ":")


def rewritten_call(code: RowLoopCode, rewrite: Rewrite, variables: dict[str, Any]) -> Callable[..., Any]:
    """Compile the method with a rewrite.

    Args:
        code: the loop and its method.
        rewrite: a rewrite of the loop.
        variables: globals of the method.

    Raises:
        Exception: the definition fails here, because it uses variables of an enclosing function. Such variables in the
            body fail when the result is called.
    """
    function = copy.deepcopy(code.function)
    function.decorator_list = []
    _Replace(code, rewrite).visit(function)
    # In a class of the same name, for the names that begin with two underscores.
    cls = ast.ClassDef(name=code.class_name, bases=[], keywords=[], body=[function], decorator_list=[])
    future = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module(body=[*future, cls], type_ignores=[]))
    names = dict(variables)
    exec(compile(module, "<the vectorized code>", "exec"), names)
    rewritten: Callable[..., Any] = vars(names[code.class_name])[function.name]
    return rewritten


class _Replace(ast.NodeTransformer):
    """Applies a rewrite to a copy of the method."""

    def __init__(self, code: RowLoopCode, rewrite: Rewrite) -> None:
        write = _only_write(code)
        assert write is not None
        self._loop, self._write = _position(code.loop), _position(write)
        self._rewrite = rewrite

    def visit(self, node: ast.AST) -> Any:
        """Put statements around the loop, and replace the write."""
        self.generic_visit(node)
        if isinstance(node, ast.For) and _position(node) == self._loop:
            return [*ast.parse(self._rewrite.before).body, node, *ast.parse(self._rewrite.after).body]
        if isinstance(node, ast.Assign | ast.AugAssign) and _position(node) == self._write:
            return ast.parse(self._rewrite.instead).body
        return node


def _position(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


class _Draft:
    """Writes the statements of rewrites, with names that the method does not use."""

    def __init__(self, code: RowLoopCode, write: Write) -> None:
        self._logits = code.logits
        self._write = write
        self._line = write.lineno
        self._operator = f"{_OPERATORS[type(write.op)]}=" if isinstance(write, ast.AugAssign) else "="
        self._value = ast.unparse(write.value)
        self._is_same = _is_same_for_all(write.value, _names_bound_in(code.loop))
        inner = _inner_loop(code.loop, write)
        self._inner_names = set() if inner is None else _names_in(inner.target)
        self._is_inner = inner is not None
        used = {node.id for node in ast.walk(code.function) if isinstance(node, ast.Name)}
        self._rows, self._columns, self._values, self._ids = (
            _unused(name, used) for name in ("rows", "columns", "values", "ids")
        )

    def of_columns(self, row: str, columns: ast.expr) -> Iterator[Rewrite]:
        """Yield rewrites of `logits[row, columns] = value`."""
        if isinstance(columns, ast.Slice):
            if _is_same_for_all(columns, set()):
                yield from self.of_rows(row, ast.unparse(columns))
            return
        if self._is_inner:
            yield from self._of_repeated(row, columns)
            return
        ids, rows, all_ids = self._ids, self._rows, self._columns
        after = f"{self._logits}[{rows}, {all_ids}] {self._operator} {self._values_written()}"
        for listed in (f"{ids}.tolist()", ids):
            collect = f"{ids} = {ast.unparse(columns)}\n{rows} += [{row}] * len({ids})\n{all_ids} += {listed}"
            yield self._rewrite(f"{collect}{self._collect_value(f' * len({ids})')}", after)
        yield self._rewrite(f"{self._append(row, columns)}{self._collect_value('')}", after)

    def of_rows(self, row: str, columns: str) -> Iterator[Rewrite]:
        """Yield rewrites of `logits[row, columns] = value`, where all rows have the same columns."""
        if self._is_inner:
            return
        rows, values = self._rows, self._values
        target = f"{self._logits}[{rows}]" if columns == ":" else f"{self._logits}[{rows}, {columns}]"
        collect = f"{rows}.append({row}){self._collect_value('')}"
        match self._write.value:
            case ast.Call(func=ast.Attribute(attr="masked_fill"), args=[mask, filling]) if self._operator == "=":
                collect = f"{rows}.append({row})\n{values}.append({ast.unparse(mask)})"
                filled = f"{target}.masked_fill(torch.stack({values}), {ast.unparse(filling)})"
                yield self._rewrite(collect, f"{target} = {filled}", needs_values=True)
                return
        if self._is_same:
            yield self._rewrite(collect, f"{target} {self._operator} {self._value}")
            return
        yield self._rewrite(collect, f"{target} {self._operator} torch.stack({values})")
        yield self._rewrite(collect, f"{target} {self._operator} {self._logits}.new_tensor({values})[:, None]")

    def _of_repeated(self, row: str, column: ast.expr) -> Iterator[Rewrite]:
        """Yield rewrites of a write for one token, in a loop over tokens that may repeat."""
        # Only these give the same result for a token that occurs twice.
        repeats = {"=": self._is_same, "+=": True, "-=": True}
        reads_logits = self._logits in _names_in(self._write.value)
        if reads_logits or not repeats.get(self._operator) or not _names_in(column) & self._inner_names:
            return
        place = f"{self._logits}[{self._rows}, {self._columns}]"
        after = f"{place} = {self._value}"
        if self._operator != "=":
            value = self._value if self._is_same else self._values
            values = f"{'-' * (self._operator == '-=')}{self._logits}.new_tensor({value})"
            places = f"(torch.tensor({self._rows}), torch.tensor({self._columns}))"
            after = f"{self._logits}.index_put_({places}, {values}, accumulate=True)"
        yield self._rewrite(f"{self._append(row, column)}{self._collect_value('')}", after)

    def _append(self, row: str, column: ast.expr) -> str:
        return f"{self._rows}.append({row})\n{self._columns}.append({ast.unparse(column)})"

    def _collect_value(self, times: str) -> str:
        """Return the statement that collects the value of a row, on a line of its own; "" if all have the same."""
        if self._is_same:
            return ""
        return f"\n{self._values} += [{self._value}]{times}" if times else f"\n{self._values}.append({self._value})"

    def _values_written(self) -> str:
        return self._value if self._is_same else f"{self._logits}.new_tensor({self._values})"

    def _rewrite(self, instead: str, write: str, *, needs_values: bool = False) -> Rewrite:
        used = [self._rows]
        used += [self._columns] if self._columns in write else []
        used += [self._values] if needs_values or not self._is_same else []
        before = "\n".join(f"{name} = []" for name in used)
        return Rewrite(self._line, before, instead, f"if {self._rows}:\n    {write}")


def _only_write(code: RowLoopCode) -> Write | None:
    """Return the write to the logits in a loop, if there is exactly one, to the rows of one tensor."""
    writes: list[Write] = []
    for node in ast.walk(code.loop):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))]) if name == code.logits:
                writes.append(node)
            case ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name)), op=op) if name == code.logits:
                if type(op) not in _OPERATORS:
                    return None
                writes.append(node)
    return writes[0] if len(writes) == 1 else None


def _can_be_delayed(code: RowLoopCode, write: Write) -> bool:
    """Return whether the rest of the loop cannot see the write, and whether the end of the loop is always reached."""
    leaves = (ast.Return, ast.Yield, ast.YieldFrom, ast.Try, ast.Raise, ast.With)
    if code.loop.orelse or any(isinstance(node, leaves) for node in ast.walk(code.loop)):
        return False
    inside = set(map(id, ast.walk(write)))
    others = (node for statement in code.loop.body for node in ast.walk(statement) if id(node) not in inside)
    return not any(
        isinstance(node, ast.Name) and node.id == code.logits and not _is_shape(node, code.loop) for node in others
    )


def _is_shape(name: ast.Name, loop: ast.For) -> bool:
    """Return whether the logits are only asked for their shape, dtype or device."""
    return any(
        isinstance(node, ast.Attribute) and node.value is name and node.attr in ("shape", "dtype", "device")
        for node in ast.walk(loop)
    )


def _inner_loop(loop: ast.For, write: Write) -> ast.For | None:
    """Return the loop inside `loop` that the write is in."""
    for node in ast.walk(loop):
        if node is not loop and isinstance(node, ast.For | ast.While) and write in list(ast.walk(node)):
            return node if isinstance(node, ast.For) else ast.For(ast.Name("_"), ast.Name("_"), [], [])
    return None


def _names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _names_bound_in(loop: ast.For) -> set[str]:
    return {node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _is_same_for_all(value: ast.expr, bound: set[str]) -> bool:
    """Return whether an expression is the same for all rows: uses nothing that the loop sets, and only calls `float`.

    Args:
        value: the expression.
        bound: names that the loop sets.
    """
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and ast.unparse(node.func) != "float":
            return False
        if isinstance(node, ast.Name) and node.id in bound:
            return False
    return True


def _unused(name: str, used: set[str]) -> str:
    while name in used:
        name = f"all_{name}"
    return name


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())


def equal_logits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Return whether two runs returned the same logits, apart from rounding."""
    return len(first) == len(second) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
        for one, other in zip(first, second, strict=True)
    )
