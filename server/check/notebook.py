"""Implementation of `CustomLogitProcessor.check()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logitship.client.check_report import CheckReport
from logitship.client.processor import CustomLogitProcessor
from logitship.server.config import ServerConfig

from .check_options import CheckOptions
from .class_import import require_processor_class
from .run import run_check


def check_class(
    cls: type[CustomLogitProcessor],
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    *,
    prompt: str | Sequence[str] | None,
    max_tokens: int,
    batch_sizes: Sequence[int],
    ignore: Sequence[str],
    settings: Mapping[str, Any],
) -> CheckReport:
    """Check a class. See `CustomLogitProcessor.check`.

    Raises:
        UsageError: an option is invalid, or the class cannot be checked.
        StartError: the model cannot be loaded, or no sandbox can be started.
        ValueError: a setting is out of range.
        TypeError: `settings` has a name that is not a setting of the server.
    """
    sets = [] if params is None else [params] if isinstance(params, Mapping) else list(params)
    prompts = CheckOptions().prompts if prompt is None else [prompt] if isinstance(prompt, str) else list(prompt)
    options = CheckOptions(
        params=sets, prompts=prompts, max_tokens=max_tokens, batch_sizes=batch_sizes, ignore=frozenset(ignore)
    )
    return run_check(require_processor_class(cls, cls.__qualname__), options, ServerConfig(**settings))
