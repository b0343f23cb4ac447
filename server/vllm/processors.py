"""The processors of requests to vLLM, loaded: the same library and the same executors as in logitship's own server.

Two processes load them. The front end does it on trial, to refuse a request before vLLM takes it. The engine core does
it to run them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS, Registry
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.trees.token_tree_format import TreeFormatError, load_tree
from logitship.client.errors import ProcessorLoadError
from logitship.sampler.processors.executor import DisabledExecutor, ProcessorExecutor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_cache import ProcessorCache, ProcessorCacheFull
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.spare_sandboxes import NUM_SPARES
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.processors.callable_library import CallableLibrary
from logitship.server.processors.processor_library import InvalidParams, ProcessorLibrary, ProcessorNotAllowed
from logitship.server.processors.registered_processors import RegisteredProcessors
from logitship.server.requests.messages import ProcessorRequest

from .dry_run_executor import DryRunExecutor
from .extra_args import PROCESSORS, read_processors, sampling_params
from .log import logger
from .settings import PREFIX, PluginSettings

SHIPPING_IS_OFF = (
    "this server does not take processors that come with requests: its operator has to set "
    f"{PREFIX}ENABLE_CUSTOM_LOGIT_PROCESSOR=1"
)

_NAMES_IN_SANDBOXES = "logitship.builtin_processors.sglang_names:SGLANG_NAMES"
"""Where another process finds what `SGLANG_NAMES` is here."""
_CACHE_BYTES = 64 << 20
_TRIALS = 4096
"""Verdicts that the front end remembers."""


class RequestProcessors:
    """Loads what requests carry, and gives it back.

    Args:
        executor: runs what was shipped.
        max_entries: most shipped processors that are kept.

    Attributes:
        in_use: how many uses were loaded and not given back.

    Raises:
        ValueError: a tree of the operator's cannot be read.
    """

    def __init__(
        self, settings: PluginSettings, model: ModelView, executor: ProcessorExecutor, *, max_entries: int
    ) -> None:
        self.in_use = 0
        self._max_size = settings.max_processor_size
        self._eos_token_ids = model.eos_token_ids
        self._library = ProcessorLibrary(
            _registry(settings),
            ProcessorCache(executor, max_entries=max_entries, max_bytes=_CACHE_BYTES),
            InProcessExecutor(SGLANG_NAMES),
            model,
            RegisteredProcessors(max_entries=1, max_bytes=1),
            CallableLibrary(None, model.tokenizer),
            settings.allowed_digests,
        )

    def load(self, params: Any, rid: str) -> SamplingParams:
        """Load the processors of a request; give them back with `release`.

        Args:
            params: vLLM's `SamplingParams`, of a request that carries processors.
            rid: the request id.

        Returns:
            The request's parameters as processors see them, with `processors` ready to run.

        Raises:
            ValueError: it cannot run with them; the message is for the client.
        """
        carried = read_processors(params.extra_args, self._max_size)
        uses: list[ProcessorUse] = []
        try:
            for place, request in enumerate(carried):
                try:
                    uses.append(self._use(request, rid))
                    self.in_use += 1
                except (ValueError, ProcessorLoadError, ProcessorCacheFull, PreparationUnavailable) as error:
                    raise ValueError(f"{PROCESSORS}[{place}]: {error}" if len(carried) > 1 else str(error)) from None
            return sampling_params(params, uses, self._eos_token_ids)
        except BaseException:
            self._give_back(uses)
            raise

    def release(self, params: SamplingParams) -> None:
        """Say that a request is done with what `load` gave it."""
        self._give_back(params.processors)

    def _use(self, request: ProcessorRequest, rid: str) -> ProcessorUse:
        try:
            processor = self._library.acquire(request.string, tenant="")
        except ProcessorNotAllowed as refused:
            raise ValueError(str(refused).replace("--allow-processor", f"{PREFIX}ALLOW_PROCESSOR")) from None
        try:
            prepared = self._library.prepare(processor, request.params, own=request.own)
        except InvalidParams as error:
            self._library.release(processor)
            raise ValueError(f"parameters of {processor.name}: {error}") from None
        except BaseException:
            self._library.release(processor)
            raise
        return ProcessorUse(processor, dict(request.params or {}), rid, prepared)

    def _give_back(self, uses: Any) -> None:
        for use in uses:
            self._library.release(use.processor)
            self.in_use -= 1


def on_trial(settings: PluginSettings, model: ModelView) -> RequestProcessors:
    """Loads a processor once, and remembers how that ended. Nothing is called."""
    executor = shipped_executor(settings, model, max_rows=1)
    return RequestProcessors(settings, model, DryRunExecutor(executor), max_entries=_TRIALS)


def to_run(settings: PluginSettings, model: ModelView, max_rows: int) -> RequestProcessors:
    """Keeps them loaded, to run them.

    Args:
        max_rows: rows of the batch.
    """
    executor = shipped_executor(settings, model, max_rows)
    return RequestProcessors(settings, model, executor, max_entries=settings.max_sandboxes)


def shipped_executor(settings: PluginSettings, model: ModelView, max_rows: int) -> ProcessorExecutor:
    """Who runs what was shipped. Starts the zygote of the sandboxes: seconds.

    Raises:
        ValueError: the kernel cannot sandbox shipped code.
    """
    if not settings.enable_custom_logit_processor:
        return DisabledExecutor(SHIPPING_IS_OFF)
    if settings.processor_isolation == "none":
        logger.warning("%sPROCESSOR_ISOLATION=none: code that comes with requests runs in this process", PREFIX)
        return InProcessExecutor(SGLANG_NAMES)
    zygote = ZygoteProcess(names=_NAMES_IN_SANDBOXES, max_rows=max_rows, memory_limit=settings.sandbox_memory)
    zygote.start()
    try:
        protections = zygote.set_up(model)
    except ZygoteError as error:
        zygote.close()
        raise ValueError(f"processors that come with requests cannot be run in sandboxes: {error}") from error
    logger.info("shipped processors run in sandboxes, protected by: %s", protections.describe())
    limits = SandboxLimits(
        cpu_time=settings.sandbox_cpu_time,
        step_timeout=settings.sandbox_step_timeout,
        load_timeout=settings.sandbox_load_timeout,
    )
    return SandboxExecutor(zygote, limits, max_rows, model.vocab_size, NUM_SPARES)


def _registry(settings: PluginSettings) -> Registry:
    """What a request can ask for by name: all but grammars, which vLLM has itself (`structured_outputs`)."""
    registry = Registry(processor for processor in BUILTIN_PROCESSORS if processor is not GrammarProcessor)
    trees = {name: _tree(file) for name, file in (settings.tree or {}).items()}
    registry.add(TreeLogitsProcessor.name, TreeLogitsProcessor, partial(TreeLogitsProcessor, trees))
    return registry


def _tree(file: str) -> TokenTree:
    try:
        return load_tree(file)
    except OSError as error:
        raise ValueError(f"{PREFIX}TREE: {file} cannot be read: {error.strerror}") from error
    except TreeFormatError as error:
        raise ValueError(f"{PREFIX}TREE: {file} holds no tree: {error}") from error
