"""`logitship.AsyncLLM`: the engine in an asyncio program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Self
from uuid import uuid4

from .engine_owner import EngineOwner
from .outputs import RequestOutput
from .request_builder import PromptLike, SamplingParamsLike


class AsyncLLM(EngineOwner):
    """`LLM` for asyncio: one prompt per call, with its output streamed.

    Args:
        model: the default model's name, a Hugging Face folder, a GGUF file, or a hub name. Loading it blocks.
        logits_processors: batch processors to install, see `ServerConfig.logits_processors`; they run for all prompts.
        **options: as for `LLM`.

    Raises:
        TypeError, ValueError, StartError: as `LLM`.
    """

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParamsLike | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate continuations of one prompt.

        To stop early, use `contextlib.aclosing` or cancel the task: either cancels the request. If the engine's queue
        is full, the request waits.

        Args:
            prompt: a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": [...]}`.
            sampling_params: `SamplingParams`, or a dict in SGLang's names.
            request_id: for `abort`; unique among running requests.

        Yields:
            The output so far, of all `n` continuations; `finished` is True for the last one.

        Raises:
            ValueError, TypeError, GenerationError, ProcessorFault: as `LLM.generate`.
        """
        self._check_open()
        rid = uuid4().hex if request_id is None else request_id
        with self._runner.abort_signal(rid) as signal:
            (request,) = await asyncio.to_thread(self._requests.build, [prompt], sampling_params, [rid], at="prompt")
            async with aclosing(self._runner.stream(request, signal)) as outputs:
                async for output in outputs:
                    yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Cancel requests, also those that wait. The last output of each has the finish reason `abort`.

        Unknown ids are ignored.
        """
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._runner.abort(one)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # In a thread: the engine's current step has to end first.
        await asyncio.to_thread(self.shutdown)
