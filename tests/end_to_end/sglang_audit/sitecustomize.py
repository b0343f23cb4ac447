"""Recorder of what pickles load, in every process of a server that imports from this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_LOG = "LOGITSHIP_TEST_AUDIT"


def write(line: str) -> None:
    """Add a line to the file."""
    with open(os.environ[_LOG], "a") as file:
        file.write(f"{line}\n")


def record(event: str, args: tuple[Any, ...]) -> None:
    """Write the name that a pickle looks up to the file."""
    if event == "pickle.find_class":
        write(f"{args[0]}.{args[1]}")


def recorded(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of dill that writes its name when it is called, also for pickles that look up no name."""

    def load_and_record(*args: Any, **kwargs: Any) -> Any:
        write(name)
        return load(*args, **kwargs)

    return load_and_record


if _LOG in os.environ:
    sys.addaudithook(record)
    import dill

    dill.loads, dill.load = recorded("dill.loads", dill.loads), recorded("dill.load", dill.load)
