"""Search for loops over rows in the author's source, with advice on what is slow in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.source.source_text import SourceFile, find_function, source_file

from .vectorize import OUTSIDE_CLASS, RowLoopCode

_TOKENIZER_CALLS = frozenset(
    {"batch_decode", "convert_ids_to_tokens", "convert_tokens_to_ids", "decode", "encode", "get_vocab"}
)
_MAKERS = frozenset({"arange", "as_tensor", "full", "full_like", "ones", "ones_like", "tensor", "zeros", "zeros_like"})
_TO_PYTHON = frozenset({"item", "tolist", "numpy", "cpu"})


@dataclass(frozen=True)
class RowLoop:
    """A loop over rows.

    Attributes:
        file: path of the source file.
        line: line number of the loop.
        text: its first line.
        advice: how to remove it, or do less in it.
        code: the loop in its method, to rewrite it.
    """

    file: str
    line: int
    text: str
    advice: str
    code: RowLoopCode

    @property
    def location(self) -> str:
        """File name and line number, for display."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


def find_row_loops(cls: type[CustomLogitProcessor]) -> list[RowLoop]:
    """Return the loops over rows in `__call__`; none if there is no source.

    A loop is over rows if its iterable mentions the parameter list or the logits.
    """
    function = cls.__call__
    # The loop of `RowProcessor` is ours: its author chose to write for one row.
    if not isinstance(function, FunctionType) or function.__qualname__ == "RowProcessor.__call__":
        return []
    file = source_file(function.__code__.co_filename, function.__globals__)
    node = None if file is None else find_function(file, function.__code__)
    if file is None or not isinstance(node, ast.FunctionDef):
        return []
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    class_name = owner if owner.isidentifier() else OUTSIDE_CLASS  # owner: "" or "<locals>", as of `__call__ = edit`
    names = {argument.arg for argument in node.args.args[1:3]}
    logits = node.args.args[1].arg if len(node.args.args) > 1 else ""
    loops = (loop for loop in _loops(node) if _mentions(loop.iter, names))
    return [_described(file, RowLoopCode(class_name, node, loop, logits)) for loop in loops]


def _loops(node: ast.AST) -> Iterator[ast.For]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.For))


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def _described(file: SourceFile, code: RowLoopCode) -> RowLoop:
    loop = code.loop
    advice = "\n".join(_advice(loop, code.logits)) or (
        "Collect what differs from row to row in lists, make one tensor of each list, and edit all rows at once."
    )
    return RowLoop(file.filename, loop.lineno, file.lines[loop.lineno - 1].strip(), advice, code)


def _advice(loop: ast.For, logits: str) -> Iterator[str]:
    """Yield advice, the most expensive problem first, each kind once."""
    kinds: set[str] = set()
    for line, kind, text in sorted(_hints(loop, logits), key=lambda hint: (_ORDER.index(hint[1]), hint[0])):
        if kind not in kinds:
            kinds.add(kind)
            yield f"Line {line}: {text}"


_ORDER = ("tokenizer", "history", "make", "python", "write")


def _hints(loop: ast.For, logits: str) -> Iterator[tuple[int, str, str]]:
    """Yield a line number, a kind and a text for each problem."""
    rows = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for node in (inner for statement in loop.body for inner in ast.walk(statement)):
        match node:
            case ast.Call(func=ast.Attribute(attr="tokenizer")):
                yield node.lineno, "tokenizer", _TOKENIZER_HINT.format("the tokenizer")
            case ast.Call(func=ast.Attribute(attr=name)) if name in _TOKENIZER_CALLS and _is_tokenizer(node.func):
                yield node.lineno, "tokenizer", _TOKENIZER_HINT.format(f"the tokenizer's {name}()")
            case ast.Call(func=ast.Name(id="len" | "isinstance" | "bool")):
                pass  # of a history: costs nothing
            case ast.Call(args=[ast.Attribute(attr="output_ids" | "origin_input_ids") as ids, *_]):
                yield node.lineno, "history", _HISTORY_HINT.format(ids.attr)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in _MAKERS:
                yield node.lineno, "make", _MAKE_HINT.format(name)
            case ast.Call(func=ast.Attribute(attr=name)) if name in _TO_PYTHON:
                yield node.lineno, "python", _PYTHON_HINT.format(name)
            case ast.Assign(targets=[ast.Subscript() as target]) | ast.AugAssign(target=ast.Subscript() as target):
                if _is_row_write(target, logits, rows):
                    yield node.lineno, "write", _WRITE_HINT


def _is_tokenizer(function: ast.expr) -> bool:
    """Return whether this is a tokenizer's method, judging by the object's name: `….tokenizer.decode`, `tok.encode`."""
    return isinstance(function, ast.Attribute) and "tok" in ast.unparse(function.value).lower()


def _is_row_write(target: ast.Subscript, logits: str, rows: set[str]) -> bool:
    """Return whether this writes logits: `logits[…] = `, or `row[…] = ` in a loop over the logits.

    Args:
        target: the assignment's target.
        logits: name of the logits.
        rows: the loop's variables. `params["x"] = ` does not count.
    """
    if not isinstance(target.value, ast.Name):
        return False
    is_key = isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)
    return target.value.id == logits or (target.value.id in rows and not is_key)


_TOKENIZER_HINT = (
    "{} for each row and step. Look tokens up once, in a table on self; read only the new tokens of "
    "the history, and keep your position in __req__.state."
)
_HISTORY_HINT = (
    "reads all of {} in each step, which gets slower with every token. Keep the result and your position in "
    "__req__.state."
)
_MAKE_HINT = (
    "torch.{}() makes a tensor for each row and step. Cache it in a dict on self, keyed by the parameters it uses."
)
_PYTHON_HINT = ".{}() copies values to Python for each row. Compute with tensors for all rows, and copy once."
_WRITE_HINT = "one write for each row. Collect in the loop, and write once after it."
