"""Search for the loop over rows that a line of the author's source is in."""

from __future__ import annotations

import ast
from types import FunctionType

from logitship.client.check_report import SlowLine
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.source.source_text import find_function, source_file


def row_loop_around(cls: type[CustomLogitProcessor], line: SlowLine) -> ast.For | None:
    """Return the loop over rows in `__call__` that a line is in; None if there is none, or no source.

    A loop is over rows if its iterable mentions the parameter list or the logits.
    """
    function = cls.__call__
    if not isinstance(function, FunctionType) or function.__code__.co_filename != line.file:
        return None
    file = source_file(line.file, function.__globals__)
    node = None if file is None else find_function(file, function.__code__)
    if not isinstance(node, ast.FunctionDef):
        return None
    names = {argument.arg for argument in node.args.args[1:3]}
    for loop in ast.walk(node):
        if isinstance(loop, ast.For) and loop.lineno <= line.line <= (loop.end_lineno or 0):
            is_over_rows = any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(loop.iter))
            if is_over_rows:
                return loop
    return None
