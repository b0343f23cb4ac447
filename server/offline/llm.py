"""`logitship.LLM`: the engine in a synchronous Python program."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from logitship.server.engine.async_engine import AsyncEngine

from .chat import render_conversation
from .engine_owner import EngineOwner
from .llm_beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from .loop_thread import LoopThread
from .outputs import RequestOutput
from .progress import Progress, UseTqdm
from .request_builder import OfflineRequest, PromptLike, SamplingParamsLike

T = TypeVar("T")


class LLM(EngineOwner):
    """A model for offline inference, with vLLM's interface: the server's engine without HTTP.

    Works in a script, in a thread, and inside a running event loop, which it blocks. May be shared between threads.

    Processors that are given with a prompt run in this process and are enabled by default, because they are the
    caller's own code. To run other people's code, start a server.

    Args:
        model: the default model's name, a Hugging Face folder, a GGUF file, or a hub name.
        logits_processors: batch processors to install, see `ServerConfig.logits_processors`; they run for all prompts.
        **options: fields of `ServerConfig` that are not about HTTP, and their aliases on the command line: `tokenizer`,
            `seed`, `gpu_memory_utilization`, …

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of range.
        StartError: the model or an installed processor cannot be loaded; the message says what to do.
    """

    def _own(self, engine: AsyncEngine, *, end: Callable[[], None] | None = None) -> None:
        self._loop_thread = LoopThread()
        self._request_ids = map(str, itertools.count())
        super()._own(engine, end=end or partial(_end, engine, self._loop_thread))

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParamsLike | Sequence[SamplingParamsLike] | None = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Generate continuations of prompts. Pass all prompts in one call: they are batched.

        Any exception, including Ctrl-C, cancels the rest of this call; the object stays usable.

        Args:
            prompts: a text, a list of token ids, `{"prompt": text}`, `{"prompt_token_ids": [...]}`, or a list of these,
                of any length.
            sampling_params: `SamplingParams`, a dict in SGLang's names, or a list of them, one per prompt.
            use_tqdm: show a progress bar that counts finished prompts; or a callable that makes one.

        Returns:
            One `RequestOutput` per prompt, in the order of the prompts; a list even for a single prompt.

        Raises:
            ValueError: a prompt, a parameter or a processor is refused; `InvalidRequest` and `InvalidSamplingParams`
                name it. All checks that need no loaded processor happen before any prompt runs.
            TypeError: an argument has an unsupported type.
            ProcessorFault: a processor failed; the other prompts are cancelled. `traceback` is that of the processor.
            GenerationError: the same for any other failure; `partial` is the output before it.
            RuntimeError: this object was shut down, or the limit of loaded processors is reached.
        """
        self._check_open()
        return self._run(self._requests.build(_listed(prompts), sampling_params, self._request_ids), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParamsLike | Sequence[SamplingParamsLike] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: a conversation (a list of `{"role", "content"}`), or a list of conversations.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: a Jinja template to use instead of the model's.
            add_generation_prompt: append the start of an assistant message to the prompt.
            continue_final_message: continue the last message instead of answering it; requires
                `add_generation_prompt=False`.
            chat_template_kwargs: variables for the template.

        Returns:
            One `RequestOutput` per conversation, in the given order.

        Raises:
            ValueError: as `generate`; also if the template rejects the messages.
            TypeError, ProcessorFault, GenerationError: as `generate`.
        """
        self._check_open()
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            render_conversation(
                self._engine,
                conversation,
                "messages" if is_one else f"messages[{index}]",
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                template_kwargs=chat_template_kwargs or {},
            )
            for index, conversation in enumerate(conversations)
        ]
        return self._run(self._requests.build(prompts, sampling_params, self._request_ids, at="messages"), use_tqdm)

    def beam_search(
        self, prompts: PromptLike | Sequence[PromptLike], params: BeamSearchParams, *, use_tqdm: UseTqdm = False
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of prompts.

        Args:
            prompts: as in `generate`.
            params: for all prompts.
            use_tqdm: as in `generate`.

        Returns:
            One `BeamSearchOutput` per prompt, in the order of the prompts.

        Raises:
            ValueError, TypeError, GenerationError: as `generate`.
        """
        self._check_open()
        names = {"n": "beam_width", "num_beams": "beam_width"}
        requests = self._requests.build(_listed(prompts), params.sampling_params(), self._request_ids, names=names)
        outputs = self._run(requests, use_tqdm)
        return [beam_search_output(output, params, self._engine.tokenizer) for output in outputs]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, requests: Sequence[OfflineRequest], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run requests on the loop thread, and update the bar here: a notebook's bar belongs to the cell's thread."""
        outputs: dict[int, RequestOutput] = {}
        finished: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        with Progress(use_tqdm, len(requests)) as progress:
            running = self._loop_thread.submit(self._runner.run_all(requests, lambda *each: finished.put(each)))
            running.add_done_callback(lambda _: finished.put(None))
            try:
                while (item := _get(finished)) is not None:
                    index, outputs[index] = item
                    progress.tick(outputs[index])
                running.result()
            except CancelledError:
                raise RuntimeError("this LLM was shut down while it ran") from None
            except BaseException:  # cleanup, then re-raised
                running.cancel()
                raise
        return [outputs[index] for index in range(len(requests))]


def _get(items: queue.SimpleQueue[T]) -> T:
    """Return the next item. A Ctrl-C just before the thread sleeps does not wake it up: it looks once a second."""
    while True:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=1.0)


def _end(engine: AsyncEngine, loop_thread: LoopThread) -> None:
    engine.stop()
    loop_thread.stop()


def _listed(prompts: Any) -> list[Any]:
    is_one = isinstance(prompts, str | bytes | bytearray | Mapping) or (prompts and type(prompts[0]) is int)
    return [prompts] if is_one else list(prompts)
