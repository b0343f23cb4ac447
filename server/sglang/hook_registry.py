"""Registration of the plugin's hooks with SGLang."""

from __future__ import annotations

from collections.abc import Sequence

from logitship.server.runtime.hook_target import HookTarget, check_targets

VERSION = "0.5.23"
"""The version of SGLang that the plugin was made for."""


def apply_hooks(targets: Sequence[HookTarget]) -> None:
    """Wrap functions of SGLang.

    Raises:
        ValueError: they are not those that the plugin knows, or SGLang did not wrap one, which it only logs.
    """
    check_targets(targets, f"SGLang {VERSION}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for target in targets:
        HookRegistry.register(target.path, target.hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    missing = [target.path for target in targets if target.path not in HookRegistry._patched]
    if missing:
        raise ValueError(f"SGLang did not apply the hooks of {', '.join(missing)}")
