"""Conversion of the keyword arguments of `LLM` and `AsyncLLM` to a `ServerConfig`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from logitship.server.config import DEFAULT_MODEL, ServerConfig
from logitship.server.flags import FLAGS

_OWN_CODE = {
    "enable_custom_logit_processor": True,
    "logits_processor_pattern": ".*",
    "processor_isolation": "none",
}
"""Defaults: the processors are the caller's own code, so they run in this process without a sandbox."""

_HTTP = "HTTP"
"""The group of flags that only apply to a server."""


def read_options(model: str, logits_processors: Iterable[Any] | None, options: Mapping[str, Any]) -> ServerConfig:
    """Build the engine's configuration.

    Args:
        model: the model's name or path.
        logits_processors: batch processors to install.
        options: fields of `ServerConfig`, or their aliases on the command line.

    Raises:
        TypeError: an option is unknown, applies only to a server, or is given twice.
        ValueError: a value is out of range.
    """
    fields = {
        name: flag.field
        for group, flags in FLAGS.items()
        if group != _HTTP
        for flag in flags
        for name in flag.python_names
    }
    values: dict[str, Any] = {}
    for name, value in options.items():
        field = fields.get(name)
        if field is None:
            raise TypeError(_unknown(name, [*fields]))
        if field in values or (field == "model_path" and model != DEFAULT_MODEL):
            raise TypeError(f"{name}: sets {field} a second time: remove one of the two options")
        values[field] = value
    if isinstance(logits_processors, str):
        raise TypeError("logits_processors: must be a list of processors, not str: put it in a list")
    processors = tuple(logits_processors or ())
    return ServerConfig(**{**_OWN_CODE, "model_path": model, **values, "logits_processors": processors})


def _unknown(name: str, known: list[str]) -> str:
    if any(name in flag.python_names for flag in FLAGS[_HTTP]):
        return f"{name}: is an option of `logitship serve`, and does not apply without a server: remove it"
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name}: unknown option" + (f", did you mean {close[0]}?" if close else "")
