"""Time of each part of a sandboxed step, from the first copy to the last check."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from sandbox_workload import BODIES, Model, Step, shipped_step

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.call_exchange import CallExchange
from logitship.sampler.sandbox.protocol import Command
from logitship.sampler.sandbox.sandbox import Sandbox
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor
from logitship.sampler.sandbox.sandbox_run import SandboxRun
from logitship.sampler.sandbox.worker import Worker

PARTS = ("copy in", "frame", "wake-up", "parse", "call", "answer", "return", "copy out", "check")
"""Parts of a step, in order. The server copies the rows in, encodes the message, and sends it, which wakes the sandbox
up. The sandbox parses it, calls the processor, and sends its answer, which wakes the server up. The server reads the
answer, copies the rows out, and checks them."""

# The processor writes the times of its start and its end into its logits, as nothing else can leave a sandbox. A
# float32 represents integers of up to 24 bits exactly, so each time takes two of them.
SOURCE = """
import time
import torch
from logitship import CustomLogitProcessor

class Timed(CustomLogitProcessor):
    def edit(self, logits, custom_param_list):
        {body}

    def __call__(self, logits, custom_param_list=None):
        began = time.perf_counter_ns()
        logits = self.edit(logits, custom_param_list)
        ended = time.perf_counter_ns()
        logits[0, :4] = torch.tensor([float(clock >> bits & 0x3fffff) for clock in (began, ended) for bits in (22, 0)])
        return logits
"""
_CLOCK = 1 << 44
"""Nanoseconds after which the clocks in the logits begin again."""


def time_parts(
    body: str, executor: SandboxExecutor, logits: torch.Tensor, model: Model, calls: int, history: int
) -> dict[str, float]:
    """Return the median microseconds of each part of a step.

    Args:
        body: of the processor, a key of `BODIES`.
        executor: runs the processor.
        logits: float32 [rows, vocab].
        model: runs before each step.
        calls: number of steps.
        history: tokens of each row before the first step.
    """
    string = SourceProcessor(SOURCE.format(body=BODIES[body].strip()), "Timed")
    with _Recorder() as recorder:
        processor = executor.load(string)
        processor.instance.reads.never_promise = True  # so that the rows are copied in and out
        step = shipped_step(body, logits, [processor], history)
        steps = [_of_step(recorder, step, logits, model) for _ in range(calls)]
        executor.unload(processor)
    parse, answer = _of_worker(recorder.messages, logits, model)
    parts = {name: statistics.median(each[name] for each in steps) / 1000 for name in steps[0]}
    parts |= {"parse": parse, "answer": answer}
    parts["wake-up"] -= parse
    parts["return"] -= answer
    return {name: parts[name] for name in PARTS}


class _Recorder:
    """Context in which the actions of the server's side of a sandbox are recorded.

    Attributes:
        spans: when the calls of each function in this step began and ended, in nanoseconds.
        messages: kind and body of each message to the sandbox.
    """

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.messages: list[tuple[Command, bytes]] = []
        self._patches = ExitStack()

    def __enter__(self) -> _Recorder:
        for owner, name in (
            (SandboxRun, "_copy_in"),
            (SandboxRun, "_copy_out"),
            (CallExchange, "send"),
            (Sandbox, "advance"),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, self._with_span(name, getattr(owner, name))))
        for name in ("enqueue", "begin"):
            self._patches.enter_context(mock.patch.object(Sandbox, name, self._with_message(getattr(Sandbox, name))))
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    def _with_span(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            began = time.perf_counter_ns()
            result = function(*arguments)
            self.spans.setdefault(name, []).append((began, time.perf_counter_ns()))
            return result

        return recorded

    def _with_message(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(sandbox: Sandbox, kind: Command, body: bytes, *more: Any) -> Any:
            self.messages.append((kind, body))
            return function(sandbox, kind, body, *more)

        return recorded


def _of_step(recorder: _Recorder, step: Step, logits: torch.Tensor, model: Model) -> dict[str, int]:
    """Return the nanoseconds of each part of a step. "wake-up" includes parsing, "return" creating the answer."""
    model()
    recorder.spans.clear()
    began = time.perf_counter_ns()
    step()
    ended = time.perf_counter_ns()
    spans = recorder.spans
    copy_in, copy_out = (spans[name][0][1] - spans[name][0][0] for name in ("_copy_in", "_copy_out"))
    sent, received = spans["send"][0][0], spans["advance"][-1][1]
    called, done = _clocks(logits)
    return {
        "copy in": copy_in,
        "frame": sent - began - copy_in,
        "wake-up": (called - sent) % _CLOCK,
        "call": (done - called) % _CLOCK,
        "return": (received - done) % _CLOCK,
        "copy out": copy_out,
        "check": ended - received - copy_out,
    }


def _of_worker(messages: Sequence[tuple[Command, bytes]], logits: torch.Tensor, model: Model) -> tuple[float, float]:
    """Return the microseconds that a sandbox's program takes before and after the call.

    They are measured in this process, since a sandbox sends no clock.

    Args:
        messages: messages to the sandbox.
        logits: float32 [rows, vocab].
        model: runs before each message.
    """
    worker = Worker(logits, ModelView(logits.shape[1], frozenset({0}), None), {})
    before, after = [], []
    for kind, body in messages:
        model()
        began = time.perf_counter_ns()
        worker.handle(kind, body)
        ended = time.perf_counter_ns()
        if kind is Command.STEP:
            called, done = _clocks(logits)
            before.append((called - began) % _CLOCK / 1000)
            after.append((ended - done) % _CLOCK / 1000)
    return statistics.median(before), statistics.median(after)


def _clocks(logits: torch.Tensor) -> tuple[int, int]:
    """Return the times at which the processor was called and returned."""
    called, called_low, done, done_low = (int(each) for each in logits[0, :4].tolist())
    return called << 22 | called_low, done << 22 | done_low
