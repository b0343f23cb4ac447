"""What Python 3.11 can do in one thread at a time only.

It counts the depth of a syntax tree for all threads together, and two that make one at the same time may get a
`SystemError: AST constructor recursion depth mismatch`. See https://github.com/python/cpython/issues/106905.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from typing import Any

_ONE_AT_A_TIME = threading.RLock()


def parse(text: str) -> ast.Module:
    """`ast.parse`, which any thread may call.

    Raises:
        SyntaxError: as `ast.parse` does.
    """
    with _ONE_AT_A_TIME:
        return ast.parse(text)


def signature_of(target: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, which any thread may call: it parses what built-in functions say of themselves.

    Raises:
        ValueError, TypeError: as `inspect.signature` does.
    """
    with _ONE_AT_A_TIME:
        return inspect.signature(target)
