"""Where a check runs processors: the model, and fresh sandboxes as a server makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from logitship.builtin_processors.sglang_names import SGLANG_NAMES, SGLANG_NAMES_REFERENCE
from logitship.client.errors import ProcessorFault
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.processors.executor import ExecutorRow, ExecutorSequence, LoadedProcessor, ProcessorExecutor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.check.checks.params_check import Params
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel
from logitship.server.refusals import StartError


@dataclass(frozen=True)
class Called:
    """What came of a call.

    Attributes:
        logits: float32 [rows, vocab]: what the processor made of them. Rows of faults are unspecified.
        faults: by row.
        seconds: from the copying of the rows to the answer.
        row_by_row: it failed for the rows together, and was made again for each.
    """

    logits: torch.Tensor
    faults: dict[int, ProcessorFault]
    seconds: float
    row_by_row: bool


@dataclass(frozen=True, eq=False)
class Player:
    """A sequence that plays.

    Attributes:
        tokens: its output so far. Whoever appends to it tells the processor, as an engine does.
    """

    row: ExecutorRow
    tokens: list[int]

    def fork(self) -> Player:
        """Another sequence that goes on from here.

        Raises:
            ProcessorFault: what the processor keeps of this one cannot be copied.
        """
        tokens = list(self.tokens)
        return Player(self.row.fork(tokens), tokens)


class Stage:
    """A processor, loaded afresh: no sequence has been here before.

    Args:
        model: what it may know of the model.
    """

    def __init__(self, executor: ProcessorExecutor, processor: LoadedProcessor, model: ModelView) -> None:
        self._executor = executor
        self._processor = processor
        self._model = model

    def enter(self, rid: str, params: Params, prompt_token_ids: Sequence[int]) -> Player:
        """A sequence that begins."""
        tokens: list[int] = []
        sequence = ExecutorSequence(
            rid=rid,
            params=params,
            prompt_token_ids=list(prompt_token_ids),
            output_token_ids=tokens,
            sampling_params=SamplingParams(),
            model=self._model,
        )
        return Player(self._executor.attach(self._processor, sequence), tokens)

    def call(self, players: Sequence[Player], logits: torch.Tensor) -> Called:
        """Call the processor for some sequences.

        Args:
            logits: float32 [players, vocab]; not changed.
        """
        edited = logits.clone()
        outcome = self._executor.group(self._processor, [player.row for player in players]).begin(edited).finish()
        return Called(edited, dict(outcome.faults), outcome.seconds, outcome.row_by_row)


class Bench:
    """Makes stages, until it is closed.

    Args:
        config: where processors run, and within which limits.
        max_rows: most rows of a call.

    Raises:
        StartError: no sandbox can be made on this machine.
    """

    def __init__(self, config: ServerConfig, loaded: LoadedModel, max_rows: int) -> None:
        self.config = config
        self.loaded = loaded
        self.model = ModelView(loaded.vocab_size, loaded.eos_token_ids, loaded.tokenizer.hf_tokenizer)
        self._executor: InProcessExecutor | SandboxExecutor
        if config.processor_isolation == "none":
            self._executor = InProcessExecutor(SGLANG_NAMES)
        else:
            self._executor = _sandbox_executor(config, self.model, max_rows)

    def close(self) -> None:
        """End all sandboxes."""
        if isinstance(self._executor, SandboxExecutor):
            self._executor.close()

    @contextmanager
    def stage(self, string: PickledProcessor | SourceProcessor) -> Iterator[Stage]:
        """A processor in a sandbox of its own.

        Raises:
            ProcessorLoadError: it cannot be loaded there.
        """
        processor = self._executor.load(string)
        try:
            yield Stage(self._executor, processor, self.model)
        finally:
            self._executor.unload(processor)


def _sandbox_executor(config: ServerConfig, model: ModelView, max_rows: int) -> SandboxExecutor:
    zygote = ZygoteProcess(names=SGLANG_NAMES_REFERENCE, max_rows=max_rows, memory_limit=config.sandbox_memory)
    zygote.start()
    try:
        zygote.set_up(model)
    except ZygoteError as error:
        zygote.close()
        raise StartError(f"{error}\nTo check without sandboxes, in this process: --processor-isolation none") from error
    limits = SandboxLimits(
        cpu_time=config.sandbox_cpu_time,
        step_timeout=config.sandbox_step_timeout,
        load_timeout=config.sandbox_load_timeout,
    )
    return SandboxExecutor(zygote, limits, max_rows=max_rows, vocab_size=model.vocab_size)
