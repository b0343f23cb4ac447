"""Base class of `LLM` and `AsyncLLM`: owns an engine, and stops it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

from logitship.server.config import DEFAULT_MODEL
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine

from .llm_options import read_options
from .request_builder import RequestBuilder
from .runner import Runner


class EngineOwner:
    """Owns an engine until `shutdown()`, garbage collection of this object, or interpreter exit.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of range.
        StartError: the model or an installed processor cannot be loaded; the message says what to do.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, logits_processors: Iterable[Any] | None = (), **options: Any
    ) -> None:
        self._own(build_engine(read_options(model, logits_processors, options)))

    @classmethod
    def _from_engine(cls, engine: AsyncEngine) -> Self:
        """Make an instance on a running engine, which stops with it."""
        owner = cls.__new__(cls)
        owner._own(engine)
        return owner

    def _own(self, engine: AsyncEngine, *, end: Callable[[], None] | None = None) -> None:
        """Take ownership of an engine.

        Args:
            engine: a running engine.
            end: stops it and everything that belongs to it. Must not refer to this object, which would never be
                collected.
        """
        self._engine = engine
        self._requests = RequestBuilder(engine)
        self._runner = Runner(engine)
        self._end = end or engine.stop
        self._finalizer = weakref.finalize(self, _end_from_anywhere, self._end)

    def get_tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._engine.tokenizer.hf_tokenizer

    def shutdown(self) -> None:
        """Stop the engine and its threads, and abort running requests. Safe to call more than once."""
        if self._finalizer.detach() is not None:
            self._end()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"this {type(self).__name__} was shut down")


def _end_from_anywhere(end: Callable[[], None]) -> None:
    # The garbage collector may call this on one of the engine's own threads, which cannot join itself.
    if threading.current_thread() is threading.main_thread():
        end()
    else:
        # Since Python 3.12, no thread can start while the interpreter shuts down, which ends the engine's threads.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=end, name="logitship-end", daemon=True).start()
