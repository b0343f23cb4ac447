"""Installation of the plugin's hooks, if SGLang's functions are those that the plugin knows."""

from __future__ import annotations

from logitship.server.runtime.shared_directory import make_shared_directory
from logitship_sglang import logger

from .hook_registry import apply_hooks
from .hooks import TARGETS
from .sglang_settings import SglangSettings


def install() -> None:
    """Wrap SGLang's functions, so that processors run in sandboxes.

    Raises:
        ValueError: a setting is wrong, or this SGLang differs from the one that the plugin knows.
    """
    SglangSettings.from_environment()  # an error shows at the start
    try:
        make_shared_directory()
    except OSError as error:
        logger.warning("schedulers will lack the artifacts that clients upload: %s", error)
    apply_hooks(TARGETS)
