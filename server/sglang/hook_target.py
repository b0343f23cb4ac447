"""A function of SGLang that the plugin wraps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

VERSION = "0.5.23"
"""The version of SGLang that the plugin was made for."""


@dataclass(frozen=True)
class HookTarget:
    """A function of SGLang, and its hook.

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


def apply_hooks(targets: Sequence[HookTarget]) -> None:
    """Wrap functions of SGLang.

    Raises:
        ValueError: they are not those that the plugin knows, or SGLang did not wrap one, which it only logs.
    """
    if differences := [each.difference for each in targets if each.difference is not None]:
        raise ValueError(f"logitship knows SGLang {VERSION}, and this one differs: {'; '.join(differences)}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for target in targets:
        HookRegistry.register(target.path, target.hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = [target.path for target in targets if target.path not in HookRegistry._patched]
    if missing:
        raise ValueError(f"SGLang did not apply the hooks of {', '.join(missing)}")
