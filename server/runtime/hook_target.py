"""A function of an engine that a plugin wraps, if it is the one that the plugin knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class HookTarget:
    """A function of an engine, and its hook.

    Attributes:
        path: its module and name.
        parameters: names of its parameters.
        hook: called instead, with the function itself and its arguments.
    """

    path: str
    parameters: Sequence[str]
    hook: Callable[..., Any]

    @property
    def difference(self) -> str | None:
        """Description of how it differs from what the plugin knows; None: it does not."""
        try:
            found = list(inspect.signature(inspect.unwrap(resolve_name(self.path))).parameters)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            return f"{self.path}: {error}"
        found = [name for name in found if name not in ("self", "cls")]
        return None if found == list(self.parameters) else f"{self.path} takes {', '.join(found) or 'no arguments'}"

    def wrap(self) -> None:
        """Replace the function with its hook, in an engine that has no registry for that."""
        owner, _, name = self.path.rpartition(".")
        function, hook = resolve_name(self.path), self.hook

        @wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return hook(function, *args, **kwargs)

        @wraps(function)
        async def hooked_coroutine(*args: Any, **kwargs: Any) -> Any:
            return await hook(function, *args, **kwargs)

        is_coroutine = inspect.iscoroutinefunction(function)  # ASGI servers ask
        setattr(resolve_name(owner), name, hooked_coroutine if is_coroutine else hooked)


def check_targets(targets: Sequence[HookTarget], engine: str) -> None:
    """Check that functions are those that the plugin knows.

    Args:
        targets: the functions.
        engine: name and versions of the engine that the plugin knows.

    Raises:
        ValueError: they differ.
    """
    if differences := [each.difference for each in targets if each.difference is not None]:
        raise ValueError(f"logitship knows {engine}, and this one differs: {'; '.join(differences)}")
