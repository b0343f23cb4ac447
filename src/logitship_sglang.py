"""The entry point that SGLang calls in each of its processes, and the refusal to unpickle anything.

SGLang logs what a plugin raises, and starts without it: then it unpickles the processors of its clients. So this module
stands beside the package, whose `__init__` imports the client, and imports nothing but the standard library. It can be
imported whatever else cannot, closes the door first, and only then imports the rest of the plugin.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import wraps
from pkgutil import resolve_name
from typing import Any

logger = logging.getLogger("sglang.logitship")
"""The plugin's logger: a child of SGLang's."""

REFUSES_ALL = "logitship refuses custom logit processors on this server"
"""Start of `NOT_RUN`, by which clients recognize it."""
NOT_RUN = f"{REFUSES_ALL}, because its plugin could not be installed there: the server's log says why"
"""Reason for clients when the plugin could not be installed completely."""
GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
"""SGLang's function that every request passes first, in the front end."""


def load() -> None:
    """Install the plugin in this process of SGLang.

    Raises:
        SystemExit: processors can neither be run nor be refused. SGLang does not start.
    """
    try:
        refuse_unpickling()
        from logitship.server.sglang.installation import install

        install()
    except Exception:  # boundary: SGLang
        logger.exception("logitship cannot run custom logit processors in this SGLang: all of them are refused")
        try:
            refuse_requests()
        except Exception as error:  # boundary: SGLang
            raise SystemExit(
                f"logitship cannot keep this SGLang from unpickling custom logit processors: {error}. Uninstall "
                "logitship, or leave it out of SGLANG_PLUGINS"
            ) from error


class ProcessorText:
    """The string of a processor, which stays a string. SGLang keeps it where it would keep the unpickled instance.

    Attributes:
        text: the string.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """End the requests, and return the logits unchanged.

        Called only if SGLang's step does not run through the plugin.
        """
        for params in custom_param_list or ():
            request = params.get("__req__") if isinstance(params, dict) else None
            if request is None:
                logger.error("a request runs without its custom logit processor: %s", NOT_RUN)
            else:
                request.to_finish = _abort(NOT_RUN)
        return logits


def _abort(message: str) -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # pyright: ignore[reportMissingImports]

    return FINISH_ABORT(message, 400, "BadRequestError")


def refuse_unpickling() -> None:
    """Replace the functions with which SGLang unpickles processor strings, in this process."""
    from sglang.srt.sampling import custom_logit_processor  # pyright: ignore[reportMissingImports]

    def from_str(cls: type, json_str: str) -> ProcessorText:
        """Return the string itself, instead of unpickling what is in it."""
        return ProcessorText(json_str)

    custom_logit_processor.CustomLogitProcessor.from_str = classmethod(from_str)
    custom_logit_processor._cache_from_str = _refuse
    for loads in ("dill", "pickle", "cloudpickle"):
        if hasattr(custom_logit_processor, loads):
            setattr(custom_logit_processor, loads, _NoLoads(getattr(custom_logit_processor, loads)))


def refuse_requests() -> None:
    """Let SGLang's front end refuse requests with processors, whatever else wraps its functions."""
    path, _, name = GENERATE.rpartition(".")
    manager = resolve_name(path)
    generate_request = getattr(manager, name)

    @wraps(generate_request)
    async def refuse(self: Any, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        if getattr(obj, "custom_logit_processor", None):
            raise ValueError(NOT_RUN)
        async with aclosing(generate_request(self, obj, *args, **kwargs)) as responses:
            async for response in responses:
                yield response

    setattr(manager, name, refuse)


def _refuse(json_str: str) -> Any:
    raise ValueError(NOT_RUN)


class _NoLoads:
    """A module for serialization without its functions that load.

    Args:
        module: the module.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name in ("load", "loads"):
            raise ValueError(NOT_RUN)
        return getattr(self._module, name)
