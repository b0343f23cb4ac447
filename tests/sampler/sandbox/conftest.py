"""An executor on a zygote that all tests share, and calls of its processors."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.executor import (
    ExecutorRow,
    ExecutorSequence,
    LoadedProcessor,
    ProcessorExecutor,
    RunOutcome,
)
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox import sandbox_executor
from logitship.sampler.sandbox.cpu_time import background_cores
from logitship.sampler.sandbox.sandbox import Sandbox
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.zygote_process import ZygoteProcess
from logitship.server.tokenizer import Tokenizer

NAMES = "logitship.builtin_processors.sglang_names:SGLANG_NAMES"
MAX_ROWS, VOCAB = 8, 260
EOS = frozenset({1})


def source(body: str) -> SourceProcessor:
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    header = "import torch\nfrom logitship import CustomLogitProcessor\n\nclass P(CustomLogitProcessor):\n"
    return SourceProcessor(f"{header}    def __call__(self, logits, custom_param_list=None):\n{lines}", "P")


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> ModelView:
    return ModelView(VOCAB, EOS, tokenizer.hf_tokenizer)


class SharedZygote(ZygoteProcess):
    """A zygote that outlives the executors that use it."""

    def close(self) -> None:
        """Do nothing: see `end`."""

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="session")
def zygote(model: ModelView) -> Iterator[ZygoteProcess]:
    zygote = SharedZygote(names=NAMES, max_rows=MAX_ROWS, memory_limit=64 << 20, background_cores=background_cores(1))
    zygote.start()
    zygote.set_up(model)
    yield zygote
    zygote.end()


@pytest.fixture
def executor(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxExecutor]:
    """An executor on the shared zygote, which outlives it."""
    monkeypatch.setattr(sandbox_executor, "WATCH_INTERVAL", 0.02)
    limits = SandboxLimits(cpu_time=0.3, step_timeout=2.0, first_step_timeout=2.0, load_timeout=20.0)
    executor = SandboxExecutor(zygote, limits, MAX_ROWS, VOCAB)
    yield executor
    executor.close()


class Caller:
    """Attaches sequences to a processor, and calls it."""

    def __init__(self, executor: ProcessorExecutor, model: ModelView) -> None:
        self._executor = executor
        self._model = model

    def attach(self, processor: LoadedProcessor, **params: Any) -> ExecutorRow:
        sequence = ExecutorSequence("r", params, [1, 2], [], SamplingParams(), self._model)
        return self._executor.attach(processor, sequence)

    def call(self, processor: LoadedProcessor, *rows: ExecutorRow) -> tuple[list[float], RunOutcome]:
        """Call on rows of zeros. Return the first logit of each row, and the outcome."""
        logits = torch.zeros(len(rows), VOCAB)
        outcome = self._executor.group(processor, rows).call(logits)
        return logits[:, 0].tolist(), outcome


@pytest.fixture
def caller(executor: SandboxExecutor, model: ModelView) -> Caller:
    return Caller(executor, model)


def sandbox_of(processor: LoadedProcessor) -> Sandbox:
    sandbox: Sandbox = processor.instance.current_sandbox
    return sandbox


@contextlib.contextmanager
def stopped(pidfd: int) -> Iterator[None]:
    """Stop a process in the block."""
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    try:
        yield
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def faults(outcome: RunOutcome) -> dict[int, tuple[str, str]]:
    return {row: (fault.kind, fault.message) for row, fault in outcome.faults.items()}
