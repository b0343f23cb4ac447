"""The environment of a check: a model, and sandboxes made as a server makes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.client.errors import ProcessorFault
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.processors.early_calls import ReadHistory
from logitship.sampler.processors.executor import (
    ExecutorRow,
    ExecutorSequence,
    ExecutorUnavailable,
    LoadedProcessor,
    ProcessorExecutor,
)
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor
from logitship.sampler.sandbox.sandbox_run import SandboxedProcessor
from logitship.sampler.sandbox.zygote_process import ZygoteError
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel
from logitship.server.processors.sandboxes import new_zygote, sandbox_executor
from logitship.server.refusals import StartError

from .case_params import Params
from .check_progress import CheckProgress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallResult:
    """The result of a call.

    Attributes:
        logits: float32 [rows, vocab], as the processor returned them. Rows with a fault are unspecified.
        faults: by row.
        seconds: from the copying of the rows to the reply.
        row_by_row: the call failed for the rows together, and was repeated for each row.
        printed: the last of what it printed; "" without a sandbox.
    """

    logits: torch.Tensor
    faults: dict[int, ProcessorFault]
    seconds: float
    row_by_row: bool
    printed: str = ""


@dataclass(frozen=True, eq=False)
class CheckSequence:
    """A sequence of a check.

    Attributes:
        row: the sequence's row in the executor.
        tokens: its output so far. The caller appends to it, as an engine does, and the processor sees it.
    """

    row: ExecutorRow
    tokens: list[int]

    def fork(self) -> CheckSequence:
        """Return a copy of the sequence that continues on its own.

        Raises:
            ProcessorFault: the sequence's state cannot be copied.
        """
        tokens = list(self.tokens)
        return CheckSequence(self.row.fork(tokens), tokens)


class FreshProcessor:
    """A newly loaded processor that has seen no sequence.

    Args:
        executor: runs the processor.
        processor: the loaded processor.
        model: the model as processors see it.
        progress: counts its calls.
    """

    def __init__(
        self, executor: ProcessorExecutor, processor: LoadedProcessor, model: ModelView, progress: CheckProgress
    ) -> None:
        self._executor = executor
        self._processor = processor
        self._model = model
        self._progress = progress

    @property
    def reads(self) -> ReadHistory | None:
        """Its calls that used the values of their logits; None outside sandboxes."""
        instance = self._processor.instance
        return instance.reads if isinstance(instance, SandboxedProcessor) else None

    @property
    def dense_reason(self) -> str:
        """Reason why it cannot be called before its logits exist; "" if it can."""
        instance = self._processor.instance
        return instance.class_description.dense_reason if isinstance(instance, SandboxedProcessor) else ""

    def start_sequence(self, rid: str, params: Params, prompt_token_ids: Sequence[int]) -> CheckSequence:
        """Return a new sequence without output tokens."""
        tokens: list[int] = []
        sequence = ExecutorSequence(
            rid=rid,
            params=params,
            prompt_token_ids=list(prompt_token_ids),
            output_token_ids=tokens,
            sampling_params=SamplingParams(),
            model=self._model,
        )
        return CheckSequence(self._executor.attach(self._processor, sequence), tokens)

    def call(self, sequences: Sequence[CheckSequence], logits: torch.Tensor) -> CallResult:
        """Call the processor once for some sequences.

        Args:
            sequences: one per row.
            logits: float32 [sequences, vocab]; not changed.
        """
        self._progress.count_call()
        edited = logits.clone()
        outcome = self._executor.group(self._processor, [each.row for each in sequences]).call(edited)
        return CallResult(edited, dict(outcome.faults), outcome.seconds, outcome.row_by_row, outcome.printed)


class CheckEnvironment:
    """Loads processors into new sandboxes until it is closed.

    Args:
        config: the isolation of processors, and their limits.
        loaded: the model.
        max_rows: rows of the largest call.

    Attributes:
        progress: progress of the running check.

    Raises:
        StartError: no sandbox can be started on this machine.
    """

    def __init__(self, config: ServerConfig, loaded: LoadedModel, max_rows: int) -> None:
        self.config = config
        self.progress = CheckProgress()
        self.loaded = loaded
        self.model = ModelView(loaded.vocab_size, loaded.eos_token_ids, loaded.tokenizer.hf_tokenizer)
        self._executor: InProcessExecutor | SandboxExecutor
        if config.processor_isolation == "none":
            self._executor = InProcessExecutor(SGLANG_NAMES, self.model)
        else:
            self._executor = _sandbox_executor(config, self.model, max_rows)

    def close(self) -> None:
        """End all sandboxes."""
        if isinstance(self._executor, SandboxExecutor):
            self._executor.close()

    @contextmanager
    def fresh_processor(self, string: PickledProcessor | SourceProcessor) -> Iterator[FreshProcessor]:
        """Load a processor into a sandbox of its own, and unload it at the end of the block.

        Raises:
            ProcessorLoadError: it cannot be loaded there.
            StartError: no sandbox can be started now.
        """
        try:
            processor = self._executor.load(string)
        except ExecutorUnavailable as error:
            raise StartError(str(error)) from error
        try:
            yield FreshProcessor(self._executor, processor, self.model, self.progress)
        finally:
            self._executor.unload(processor)


def _sandbox_executor(config: ServerConfig, model: ModelView, max_rows: int) -> SandboxExecutor:
    zygote = new_zygote(config, max_rows)
    zygote.start()
    try:
        return sandbox_executor(config, zygote, model, max_rows, logger, num_spares=0)
    except ZygoteError as error:
        zygote.close()
        raise StartError(f"{error}\nTo check without sandboxes, in this process: --processor-isolation none") from error
