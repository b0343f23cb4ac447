"""Installation of the plugin's hooks, if SGLang's functions are those that the plugin knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .hooks import TARGETS
from .sglang_settings import SglangSettings

VERSION = "0.5.23"
"""The version of SGLang that the plugin was made for."""


def install() -> None:
    """Wrap SGLang's functions, so that processors run in sandboxes.

    Raises:
        ValueError: a setting is wrong, or this SGLang differs from the one that the plugin knows.
    """
    SglangSettings.from_environment()  # an error shows at the start
    if differences := [each.difference for each in TARGETS if each.difference is not None]:
        raise ValueError(f"logitship knows SGLang {VERSION}, and this one differs: {'; '.join(differences)}")
    _hook({each.path: each.hook for each in TARGETS})


def _hook(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Apply hooks around functions of SGLang.

    Raises:
        ValueError: SGLang did not apply one. It only logs that.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for path, hook in hooks.items():
        HookRegistry.register(path, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = [path for path in hooks if path not in HookRegistry._patched]
    if missing:
        raise ValueError(f"SGLang did not apply the hooks of {', '.join(missing)}")
