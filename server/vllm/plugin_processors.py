"""Loads the processors of requests to vLLM, with the loader and the executors of logitship's own server.

Two processes load them: the front end once at admission, to refuse a request before vLLM admits it, and the engine core
to run them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.builtin_processors.params import PreparationUnavailable
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS, Registry
from logitship.builtin_processors.sglang_names import SGLANG_NAMES, SGLANG_NAMES_REFERENCE
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.trees.token_tree import TokenTree
from logitship.builtin_processors.trees.token_tree_format import TreeFormatError, load_tree
from logitship.client.errors import ProcessorLoadError
from logitship.sampler.processors.executor import DisabledExecutor, ExecutorUnavailable, ProcessorExecutor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_cache import ProcessorCache, ProcessorCacheFull
from logitship.sampler.processors.processor_groups import ProcessorUse, uses_of
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.spare_sandboxes import NUM_SPARES
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.config import ServerConfig
from logitship.server.processors.processor_library import InvalidParams, ProcessorLoader, ProcessorNotAllowed
from logitship.server.requests.messages import ProcessorRequest

from .admission_executor import MAX_VERDICTS, AdmissionExecutor
from .extra_args import PROCESSORS, read_processors, sampling_params
from .log import logger
from .settings import PREFIX, PluginSettings

_LOAD_ERRORS = (ValueError, ProcessorLoadError, ExecutorUnavailable, ProcessorCacheFull, PreparationUnavailable)
SHIPPING_IS_OFF = (
    f"this server does not accept shipped processors: its operator has to set {PREFIX}ENABLE_CUSTOM_LOGIT_PROCESSOR=1"
)


class PluginProcessors:
    """Loads and releases the processors of requests.

    Args:
        executor: runs the shipped processors.
        max_entries: most shipped processors that are kept loaded.

    Attributes:
        in_use: number of uses that were loaded and not released.

    Raises:
        ValueError: a tree in the settings cannot be read.
    """

    def __init__(
        self, settings: PluginSettings, model: ModelView, executor: ProcessorExecutor, *, max_entries: int
    ) -> None:
        self.in_use = 0
        self._max_size = settings.max_processor_size
        self._eos_token_ids = model.eos_token_ids
        self._loader = ProcessorLoader(
            _registry(settings),
            ProcessorCache(executor, max_entries=max_entries, max_bytes=ServerConfig.processor_cache_bytes),
            InProcessExecutor(SGLANG_NAMES),
            model,
            settings.allowed_digests,
        )

    def load(self, params: Any, rid: str) -> SamplingParams:
        """Load the processors of a request. Give them back with `release`.

        Args:
            params: vLLM's `SamplingParams`, of a request with processors.
            rid: the request id.

        Returns:
            The request's parameters as processors see them, with `processors` ready to run.

        Raises:
            ValueError: a processor cannot be loaded or rejects its parameters; the message is for the client.
        """
        requested = read_processors(params.extra_args, self._max_size)
        uses: list[ProcessorUse] = []
        try:
            for index, request in enumerate(requested):
                try:
                    uses.append(self._use(request, rid))
                    self.in_use += 1
                except _LOAD_ERRORS as error:
                    raise ValueError(f"{PROCESSORS}[{index}]: {error}" if len(requested) > 1 else str(error)) from None
            return sampling_params(params, uses, self._eos_token_ids)
        except BaseException:  # cleanup, then re-raised
            self._release(uses)
            raise

    def release(self, params: SamplingParams) -> None:
        """Give back the processors that `load` returned."""
        self._release(uses_of(params))

    def _use(self, request: ProcessorRequest, rid: str) -> ProcessorUse:
        try:
            processor = self._loader.acquire(request.string, tenant="")
        except ProcessorNotAllowed as refused:
            raise ValueError(str(refused).replace("--allow-processor", f"{PREFIX}ALLOW_PROCESSOR")) from None
        try:
            prepared = self._loader.prepare(processor, request.params, own=request.own)
        except InvalidParams as error:
            self._loader.release(processor)
            raise ValueError(f"parameters of {processor.name}: {error}") from None
        except BaseException:  # cleanup, then re-raised
            self._loader.release(processor)
            raise
        return ProcessorUse(processor, dict(request.params or {}), rid, prepared)

    def _release(self, uses: Any) -> None:
        for use in uses:
            self._loader.release(use.processor)
            self.in_use -= 1


def for_admission(settings: PluginSettings, model: ModelView) -> PluginProcessors:
    """Return the processors of the front end: each class is loaded once, and its verdict remembered. None runs."""
    executor = shipped_executor(settings, model, max_rows=1)
    return PluginProcessors(settings, model, AdmissionExecutor(executor), max_entries=MAX_VERDICTS)


def for_execution(settings: PluginSettings, model: ModelView, max_rows: int) -> PluginProcessors:
    """Return the processors of the engine core, which keeps them loaded and runs them in up to `max_rows` rows."""
    executor = shipped_executor(settings, model, max_rows)
    return PluginProcessors(settings, model, executor, max_entries=settings.max_sandboxes)


def shipped_executor(settings: PluginSettings, model: ModelView, max_rows: int) -> ProcessorExecutor:
    """Return the executor of shipped processors. Starts the zygote of the sandboxes, which takes seconds.

    Raises:
        ValueError: the kernel lacks a feature that the sandbox needs.
    """
    if not settings.enable_custom_logit_processor:
        return DisabledExecutor(SHIPPING_IS_OFF)
    if settings.processor_isolation == "none":
        logger.warning("%sPROCESSOR_ISOLATION=none: shipped code runs in this process", PREFIX)
        return InProcessExecutor(SGLANG_NAMES)
    zygote = ZygoteProcess(names=SGLANG_NAMES_REFERENCE, max_rows=max_rows, memory_limit=settings.sandbox_memory)
    zygote.start()
    try:
        protections = zygote.set_up(model)
    except ZygoteError as error:
        zygote.close()
        raise ValueError(f"shipped processors cannot run in sandboxes: {error}") from error
    logger.info("shipped processors run in sandboxes, protected by: %s", protections.describe())
    limits = SandboxLimits(
        cpu_time=settings.sandbox_cpu_time,
        step_timeout=settings.sandbox_step_timeout,
        first_step_timeout=settings.sandbox_first_step_timeout,
        load_timeout=settings.sandbox_load_timeout,
    )
    return SandboxExecutor(zygote, limits, max_rows, model.vocab_size, NUM_SPARES)


def _registry(settings: PluginSettings) -> Registry:
    """Return the processors that requests can name: all but grammars, which vLLM has itself (`structured_outputs`)."""
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
