"""The executor that runs each shipped processor in its own sandbox.

A pool of idle sandboxes spares a new processor the wait for a fork.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from logitship.client.errors import ProcessorLoadError, with_printed
from logitship.client.scrub import scrub
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.processors.class_description import ClassDescription, from_bytes
from logitship.sampler.processors.executor import (
    ExecutorRow,
    ExecutorSequence,
    ExecutorUnavailable,
    LoadedProcessor,
    RunOutcome,
)

from .call_exchange import AnswerReceiver
from .cpu_time import BACKSTOP, FirstCallCredit
from .protocol import Answer, Command, load_message
from .sandbox import Sandbox, SandboxDied
from .sandbox_run import MAX_TEXT_LENGTH, SandboxedProcessor, SandboxRow, SandboxRun
from .spare_sandboxes import SpareSandboxes
from .zygote_process import ZygoteError, ZygoteProcess

logger = logging.getLogger(__name__)

MIN_SHARE = 1 / 32
"""Share of the step timeout that a call may take after earlier stages have used it up.

Those may belong to other requests. A request has at most 64 stages: a step takes at most three times the timeout,
and `BLOCKED_WAIT` for each."""

UNLOADED = "unloaded"
"""Reason of the end of a sandbox that is no fault."""

BLOCKED = "blocked"
"""Kind of the fault of a processor that the server's operator has blocked."""

WATCH_INTERVAL = 0.25
"""Seconds between checks of the sandboxes' CPU time outside calls."""


@dataclass(frozen=True)
class SandboxLimits:
    """Time limits of a sandbox. The zygote limits its memory.

    Attributes:
        cpu_time: CPU seconds outside calls.
        step_timeout: seconds that a tenant's calls in a step may take, see `CallDeadline`.
        first_step_timeout: seconds of the first call in a sandbox, see `FirstCallCredit`.
        load_timeout: seconds to load the processor.
    """

    cpu_time: float
    step_timeout: float
    first_step_timeout: float
    load_timeout: float


@dataclass(frozen=True)
class SandboxStats:
    """Numbers of sandboxes.

    Attributes:
        alive: currently running.
        started: total started.
        ended: total ended, by reason: `unloaded`, or the kind of a `ProcessorFault`.
    """

    alive: int
    started: int
    ended: Mapping[str, int]


class SandboxExecutor:
    """A `ProcessorExecutor` whose processors run in sandboxes: no code of a request runs in this process.

    Args:
        zygote: forks the sandboxes.
        max_rows: maximum rows of a call.
        vocab_size: width of the logits.
        num_spares: number of sandboxes to start before they are needed.

    Raises:
        RuntimeError: a thread cannot be started. The zygote is closed.
    """

    def __init__(
        self,
        zygote: ZygoteProcess,
        limits: SandboxLimits,
        max_rows: int,
        vocab_size: int,
        num_spares: int = 0,
    ) -> None:
        self._zygote = zygote
        self._limits = limits
        self._handles = itertools.count()
        self._sandboxes: set[Sandbox] = set()
        self._unreported: dict[Sandbox, SandboxedProcessor] = {}
        self._counter_lock = threading.Lock()
        self._num_started = 0
        self._ended: Counter[str] = Counter()
        self._loading: dict[tuple[str, str], SandboxLoad] = {}
        self._pending: list[SandboxRun] = []
        self._first_calls = FirstCallCredit(limits.step_timeout, limits.first_step_timeout)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="logitship-sandboxes", daemon=True)
        with contextlib.ExitStack() as on_failure:  # a thread cannot be started
            on_failure.callback(zygote.close)
            self._receiver = AnswerReceiver()
            on_failure.callback(self._receiver.close)
            self._watcher.start()
            on_failure.callback(self._stopped.set)
            self._spares = SpareSandboxes(lambda: Sandbox(zygote, max_rows, vocab_size), num_spares)
            on_failure.pop_all()

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """Load a class in a new sandbox, see `ProcessorExecutor.load`."""
        if not isinstance(string, PickledProcessor | SourceProcessor):
            raise ProcessorLoadError(f"{type(string).__name__} ships no code")
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        if isinstance(runnable, PickledProcessor):  # the source next to a pickle never runs, and takes memory
            runnable = replace(runnable, source=None, params_schema=None)
        sandboxed = SandboxedProcessor(runnable, tenant)
        self._start(sandboxed)
        description = sandboxed.class_description
        return LoadedProcessor(
            runnable.digest,
            description.name,
            self,
            sandboxed,
            tenant=tenant,
            description=description.description,
            params_schema=description.params_schema,
        )

    def ensure(self, processor: LoadedProcessor) -> None:
        """Load a class again, in another sandbox, if its sandbox has died. Blocks, and raises like `load`."""
        sandboxed: SandboxedProcessor = processor.instance
        self._start(sandboxed)

    def is_ready(self, processor: LoadedProcessor) -> bool:
        """Return whether the sandbox of a processor runs. Never blocks."""
        sandboxed: SandboxedProcessor = processor.instance
        return sandboxed.current_sandbox.is_running

    def cancel_load(self, digest: str, tenant: str) -> bool:
        """Kill the sandbox in which a class is loaded."""
        with self._counter_lock:
            load = self._loading.get((digest, tenant))
        if load is not None:
            load.cancel()
        return True

    def block(self, digests: Collection[str]) -> None:
        """Kill the sandboxes of these classes, of all tenants. Thread-safe.

        Calls of theirs end with a fault of the kind `blocked`.
        """
        for sandbox, sandboxed in list(self._unreported.items()):
            if sandboxed.digest in digests:
                sandbox.kill(BLOCKED, "was blocked by the server's operator")

    def unload(self, processor: LoadedProcessor) -> None:
        """End the sandbox of a processor."""
        sandboxed: SandboxedProcessor = processor.instance
        with sandboxed.lock:
            if sandboxed.sandbox is not None:
                self._end(sandboxed.sandbox)

    def restrict(
        self, processor: LoadedProcessor, rows: Sequence[ExecutorRow], allowed: Sequence[AllowedTokens]
    ) -> None:
        """Leave all rows open: shipped classes show what they do in their calls, one for each token."""
        for each in allowed:
            each.leave_open()

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> SandboxRow:
        """Return the row of a sequence, which is sent to the sandbox with its first call."""
        return SandboxRow(sequence, self._handles)

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> SandboxGroup:
        """Return the rows of a processor, which it is called for together."""
        return SandboxGroup(self, processor.instance, [row for row in rows if isinstance(row, SandboxRow)])

    def begin(
        self,
        sandboxed: SandboxedProcessor,
        members: Sequence[SandboxRow],
        logits: torch.Tensor | None,
        seconds_used: float = 0.0,
    ) -> SandboxRun:
        """Begin a call, see `ExecutorGroup.begin`; without logits if `SandboxRun.provide` follows."""
        sandbox = sandboxed.current_sandbox  # read once: a request that is admitted may replace it at any time
        self._receiver.release(sandbox.descriptor)  # a call of an aborted step
        run = self._new_run(sandboxed, sandbox, seconds_used)
        run.begin(sandbox, members, logits)
        return run

    def promise(self, sandboxed: SandboxedProcessor, members: Sequence[SandboxRow]) -> SandboxRun:
        """Begin a call, see `ExecutorGroup.promise`."""
        run = self.begin(sandboxed, members, None)
        run.receive_early(self._receiver)
        return run

    @property
    def can_start(self) -> bool:
        """Return whether sandboxes can be forked now. Needs no lock."""
        return self._zygote.alive

    def revive(self) -> None:
        """Start the zygote again if it died. Blocks."""
        self._zygote.revive()

    def _new_run(self, sandboxed: SandboxedProcessor, sandbox: Sandbox, seconds_used: float) -> SandboxRun:
        step_timeout = self._limits.step_timeout
        if sandbox.is_new and (extra := self._first_calls.remaining(sandboxed.tenant)):
            timeout = step_timeout + extra
            # Not several times as long: all requests wait.
            backstop = max(timeout, BACKSTOP * step_timeout)
            use = partial(self._first_calls.use, sandboxed.tenant)
            return SandboxRun(sandboxed, timeout, backstop, self._pending, use)
        timeout = max(step_timeout - seconds_used, step_timeout * MIN_SHARE)
        return SandboxRun(sandboxed, timeout, BACKSTOP * timeout, self._pending)

    def stats(self) -> SandboxStats:
        """Return the numbers of sandboxes. Thread-safe."""
        with self._counter_lock:
            num_ended = sum(self._ended.values())
            return SandboxStats(self._num_started - num_ended, self._num_started, dict(self._ended))

    def close(self) -> None:
        """End all sandboxes."""
        self._stopped.set()
        self._receiver.close()
        self._zygote.close()
        self._spares.close()
        for sandbox in list(self._sandboxes):
            self._end(sandbox)
        self._watcher.join()

    def _start(self, sandboxed: SandboxedProcessor) -> None:
        """Start a processor's sandbox, if it has no live one. Blocks.

        Raises:
            ProcessorLoadError: the processor cannot be loaded.
            ExecutorUnavailable: no sandbox can be started.
        """
        with sandboxed.lock:
            if sandboxed.sandbox is not None and sandboxed.sandbox.check():
                return
            with self._cancellable(sandboxed) as load:
                sandbox = self._take_sandbox(sandboxed)
                try:
                    load.begin(sandbox)
                    description = _load_class(sandbox, sandboxed, self._limits.load_timeout)
                except BaseException:  # cleanup, then re-raised
                    self._end(sandbox)
                    raise
            if self._zygote.in_background:
                sandbox.leave_background()
            sandboxed.describe(description)
            if sandboxed.sandbox is not None:
                self._end(sandboxed.sandbox)
            sandboxed.sandbox = sandbox

    def _take_sandbox(self, sandboxed: SandboxedProcessor) -> Sandbox:
        try:
            sandbox = self._spares.take()
        except (OSError, ZygoteError) as error:
            reason = f"no sandbox can be started: {error}"
            if not self._stopped.is_set():
                logger.error("processor %s: %s", sandboxed.digest, reason)
            raise ExecutorUnavailable(reason) from None
        self._sandboxes.add(sandbox)
        self._unreported[sandbox] = sandboxed
        with self._counter_lock:
            self._num_started += 1
        return sandbox

    @contextlib.contextmanager
    def _cancellable(self, sandboxed: SandboxedProcessor) -> Iterator[SandboxLoad]:
        """Let `cancel_load` find this load while the block runs."""
        key, load = (sandboxed.digest, sandboxed.tenant), SandboxLoad()
        with self._counter_lock:
            self._loading[key] = load
        try:
            yield load
        finally:
            with self._counter_lock:
                self._loading.pop(key, None)

    def _end(self, sandbox: Sandbox) -> None:
        self._report(sandbox)
        # Before closing it: otherwise the watcher thread would report a crash.
        if self._unreported.pop(sandbox, None) is not None:
            self._count_end(UNLOADED)
        sandbox.close()
        self._sandboxes.discard(sandbox)

    def _report(self, sandbox: Sandbox) -> None:
        """Log and count a sandbox that died, once."""
        if not sandbox.alive and (sandboxed := self._unreported.pop(sandbox, None)) is not None:
            self._count_end(sandbox.death.kind)
            if sandbox.death.kind == UNLOADED:  # its client went away: nothing to warn of
                return
            owner = f"of tenant {sandboxed.tenant}" if sandboxed.tenant else "of all clients"
            logger.warning(
                "processor %s (%s, %s) %s", sandboxed.name or "?", sandboxed.digest, owner, sandbox.death.reason
            )

    def _count_end(self, reason: str) -> None:
        with self._counter_lock:
            self._ended[reason] += 1

    def _watch(self) -> None:
        """Kill sandboxes that use too much CPU time outside calls, and report and release those that died."""
        limit = self._limits.cpu_time
        dead: set[Sandbox] = set()
        while not self._stopped.wait(WATCH_INTERVAL):
            for sandbox in list(self._sandboxes):
                sandbox.record_end()
                if sandbox.alive and sandbox.cpu_seconds_outside_calls() > limit:
                    sandbox.kill("cpu_time", f"used over {limit:g} s of CPU between its calls: its process was killed")
                self._report(sandbox)
            # Their processors may stay loaded for long. One interval later: a step may be reading an answer.
            for sandbox in dead:
                if not sandbox.in_call:
                    sandbox.close()
                    self._sandboxes.discard(sandbox)
            dead = {sandbox for sandbox in list(self._sandboxes) if not sandbox.alive}


@dataclass(frozen=True)
class SandboxGroup:
    """An `ExecutorGroup` whose processor runs in a sandbox."""

    executor: SandboxExecutor
    processor: SandboxedProcessor
    rows: Sequence[SandboxRow]

    def promise(self) -> SandboxRun | None:
        """Begin a call before its logits exist; return None if the processor probably uses their values."""
        if not self.processor.reads.may_promise():
            return None
        return self.executor.promise(self.processor, self.rows)

    def begin(self, logits: torch.Tensor, seconds_used: float = 0.0) -> SandboxRun:
        """Begin a call. It is promised its logits here too, because edits are shorter than rows."""
        if not self.processor.reads.may_promise():
            self.processor.reads.skip()
            return self.executor.begin(self.processor, self.rows, logits, seconds_used)
        run = self.executor.begin(self.processor, self.rows, None, seconds_used)
        run.provide(logits)
        return run

    def call(self, logits: torch.Tensor) -> RunOutcome:
        """Call the processor, and wait until the call has ended."""
        return self.begin(logits).finish()


def _load_class(sandbox: Sandbox, sandboxed: SandboxedProcessor, timeout: float) -> ClassDescription:
    """Load a processor in a new sandbox. Return the description of its class.

    Raises:
        ProcessorLoadError: the processor cannot be loaded; the message is for the client.
        ExecutorUnavailable: the zygote ended, or another process killed the sandbox.
    """
    try:
        sandbox.begin(Command.LOAD, load_message(sandboxed.string), timeout)
        answer, body = sandbox.finish()
        if answer is Answer.LOADED:
            return _class_description(sandbox, body)
    except SandboxDied as died:
        if sandbox.was_lost:
            raise ExecutorUnavailable("the process that sandboxes are forked from ended: try again later") from None
        if sandbox.was_killed:
            raise ExecutorUnavailable(
                "the process that was loading it was killed, as the system does when memory is short: try again later"
            ) from None
        message = f"the processor {died.reason} (while it was loaded)\n{sandboxed.traceback_of(died)}".rstrip()
        raise ProcessorLoadError(with_printed(message, sandbox.take_printed())) from None
    message = scrub(body.decode(errors="replace"))[:MAX_TEXT_LENGTH]
    raise ProcessorLoadError(with_printed(message, sandbox.take_printed()))


def _class_description(sandbox: Sandbox, body: bytes) -> ClassDescription:
    try:
        return from_bytes(body)
    except ValueError:
        raise sandbox.reject_answer() from None


class SandboxLoad:
    """A load in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._cancelled = False

    def begin(self, sandbox: Sandbox) -> None:
        """Set the sandbox that loads."""
        with self._lock:
            self._sandbox = sandbox
        if self._cancelled:
            self.cancel()

    def cancel(self) -> None:
        """Kill the sandbox, now or as soon as it has been started."""
        with self._lock:
            self._cancelled = True
            if self._sandbox is not None:
                self._sandbox.kill(UNLOADED, "was killed because its load was cancelled")
