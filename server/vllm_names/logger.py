"""`vllm.logger`."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import lru_cache, partial

_LEVELS = ("debug", "info", "warning", "error")


def init_logger(name: str) -> logging.Logger:
    """Return the logger of this name, with vLLM's `debug_once`, `info_once`, `warning_once` and `error_once`.

    They take `(message, *args, scope="local")`. `scope` selects vLLM processes, and is ignored: here is only one.
    """
    logger = logging.getLogger(name)
    for level in _LEVELS:
        setattr(logger, f"{level}_once", partial(_log_once, logger, getattr(logging, level.upper())))
    return logger


@lru_cache(maxsize=1024)  # bounded, because the arguments may come from requests; an evicted message is logged again
def _log_once(logger: logging.Logger, level: int, message: str, *args: Hashable, scope: str = "local") -> None:
    logger.log(level, message, *args, stacklevel=2)
