"""Thread-safe `ast.parse` and `inspect.signature` for Python 3.11.

Python 3.11 counts the depth of syntax trees for all threads together, so two threads that parse at the same time may
get `SystemError: AST constructor recursion depth mismatch`. See https://github.com/python/cpython/issues/106905.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from typing import Any

_LOCK = threading.RLock()


def parse(text: str) -> ast.Module:
    """Parse Python source like `ast.parse`, from any thread.

    Raises:
        SyntaxError: as `ast.parse` does.
    """
    with _LOCK:
        return ast.parse(text)


def signature_of(target: Callable[..., Any]) -> inspect.Signature:
    """Return `inspect.signature(target)`, from any thread: it parses the text signatures of built-in functions.

    Raises:
        ValueError, TypeError: as `inspect.signature` does.
    """
    with _LOCK:
        return inspect.signature(target)
