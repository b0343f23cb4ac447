"""The engine as a coroutine sees it. (Being written: this is the interface.)"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logitship.server.config import ServerConfig

from .messages import GenerationChunk, GenerationRequest

if TYPE_CHECKING:
    from logitship.server.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelInfo:
    """What clients may know of the model."""

    name: str
    path: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    architecture: str


@dataclass(frozen=True)
class EngineStats:
    """A glance at the engine."""

    running: int
    waiting: int
    steps: int
    accepting: bool
    processor_cache_hits: int
    processor_cache_misses: int
    processor_cache_evictions: int
    processor_cache_entries: int
    processor_cache_bytes: int


class AsyncEngine:
    """Submits requests to the engine's thread and hands their chunks to coroutines."""

    config: ServerConfig
    model: ModelInfo
    tokenizer: Tokenizer

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        """Admit a request.

        Raises:
            RequestRefused: it was not admitted. `param` is a name of `SamplingParams`, or `prompt`, `rid`, `n`,
                `custom_logit_processor`.
        """
        raise NotImplementedError

    def abort(self, rid: str | None) -> None:
        """Cancel one request, or all of them (`None`). Their streams end with an `abort` chunk."""

    async def flush_cache(self) -> bool:
        """Drop what is cached between requests. False, and nothing happens, while requests run or wait."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """What the engine is doing now."""
        raise NotImplementedError

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has died."""
        raise NotImplementedError

    async def shutdown(self, timeout: float) -> None:
        """Refuse new requests, let the running ones finish for at most `timeout` seconds, stop."""


class GenerationStream:
    """The chunks of one request, of all its `n` continuations interleaved, until each has its finish reason.

    Leave it early with `aclose()`: that cancels the request and frees its rows within a step.
    """

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Cancel what still runs. Harmless at the end."""
