"""Request-level callables on the server, named by requests: vLLM V0's interface, which V1 dropped."""

from __future__ import annotations

import hashlib
import inspect
import re
from typing import Any

import orjson

from logitship.client.errors import ProcessorLoadError
from logitship.sampler.author_code.callable_factory import CallableFactory
from logitship.sampler.batch_processors.interface import LogitsProcessor
from logitship.sampler.batch_processors.plugins import resolve
from logitship.sampler.processors.callable_executor import CallableExecutor
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.server.requests.messages import CallableRequest


class CallableLibrary:
    """Makes the callables that requests name.

    Importing a name runs its module, so only names that the operator allowed are imported.

    Args:
        pattern: regular expression that qualified names must match in full; None: no name is allowed.
        tokenizer: passed to classes whose constructor takes one, if the request does not.
    """

    def __init__(self, pattern: str | None, tokenizer: Any) -> None:
        self._pattern = None if pattern is None else re.compile(pattern)
        self._tokenizer = tokenizer
        self._executor = CallableExecutor()

    def check_allowed(self, target: object) -> None:
        """Refuse a name that the operator did not allow. Objects are always allowed: they come from this process.

        Raises:
            ProcessorLoadError: with vLLM's message.
        """
        if not isinstance(target, str):
            return
        if self._pattern is None:
            raise ProcessorLoadError(
                "Logits processors by name are not supported by this server. See --logits-processor-pattern engine "
                "argument for more information."
            )
        if not self._pattern.fullmatch(target):
            raise ProcessorLoadError(
                f"Logits processor {target[:200]!r} is not allowed by this server. See --logits-processor-pattern "
                "engine argument for more information."
            )

    def make(self, wanted: CallableRequest) -> LoadedProcessor:
        """Make a callable for one sequence. Runs its constructor, which may take long.

        Raises:
            ProcessorLoadError: it is not allowed, cannot be found, or its constructor failed.
        """
        self.check_allowed(wanted.target)
        name = wanted.target if isinstance(wanted.target, str) else _name(wanted.target)
        try:
            target = self._find(wanted.target) if isinstance(wanted.target, str) else wanted.target
            if isinstance(target, type) and issubclass(target, LogitsProcessor):
                raise TypeError("is a batch processor, which the server loads at its start: --logits-processors")
            made = CallableFactory(target, wanted.args, wanted.kwargs, tokenizer=self._tokenizer)()
        except Exception as error:  # boundary: author code
            raise ProcessorLoadError(
                f"Logits processor {name[:200]!r} could not be resolved: {type(error).__name__}: {error}"
            ) from error
        return LoadedProcessor(_digest(wanted, name), name, self._executor, made, per_sequence=True)

    def _find(self, name: str) -> Any:
        """Import the object of an allowed name.

        Raises:
            ImportError: it does not exist, or an allowed module imported it from one that is not allowed.
        """
        assert self._pattern is not None
        if "." in name.partition(":")[2]:
            raise ImportError("a request can name an attribute of a module only, not one of a class")
        target = resolve(name)
        if isinstance(target, type) or inspect.isroutine(target):
            # `allowed_module.Popen` would start programs, with the client's arguments.
            origin = f"{target.__module__}.{target.__qualname__}"
            spellings = (origin, f"{target.__module__}:{target.__qualname__}")
            if _package(origin) != _package(name) and not any(map(self._pattern.fullmatch, spellings)):
                raise ImportError(f"it is {origin}, which is not allowed by this server")
        return target


def _package(name: str) -> str:
    return re.split(r"[.:]", name, maxsplit=1)[0]


def _name(target: Any) -> str:
    cls = target if hasattr(target, "__qualname__") else type(target)
    return f"{cls.__module__}.{cls.__qualname__}"


def _digest(wanted: CallableRequest, name: str) -> str:
    """Return the digest of the requested callable and its arguments, the same for all sequences.

    Without the arguments, if JSON cannot express them.
    """
    # Arguments that are not JSON come only from this process. Of them, only the type is stable.
    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
    try:
        text = orjson.dumps([name, wanted.args, wanted.kwargs], default=_name, option=options)
    except orjson.JSONEncodeError:  # for example, an integer of more than 64 bits
        text = orjson.dumps([name])
    return f"sha256:{hashlib.sha256(b'callable:' + text).hexdigest()}"
