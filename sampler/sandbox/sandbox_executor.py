"""Runs each shipped processor in a sandbox of its own."""

from __future__ import annotations

import itertools
import logging
import marshal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import torch

from logitship.client.errors import ProcessorLoadError
from logitship.client.scrub import scrub
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.processors.class_description import ClassDescription, from_bytes
from logitship.sampler.processors.executor import ExecutorRow, ExecutorSequence, LoadedProcessor

from .protocol import Answer, Command
from .sandbox import Sandbox, SandboxDied
from .sandbox_run import SandboxRow, SandboxRun
from .sandboxed_processor import LONGEST_TEXT, SandboxedProcessor
from .spare_sandboxes import SpareSandboxes
from .zygote_process import ZygoteError, ZygoteProcess

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 0.25
"""Seconds between two looks at what the sandboxes do while nobody asks them for anything."""


@dataclass(frozen=True)
class SandboxLimits:
    """What a sandbox may take, beside memory, which the zygote limits.

    Attributes:
        cpu_time: CPU seconds outside its calls.
        step_timeout: seconds that a call may last.
        load_timeout: seconds that loading may last.
    """

    cpu_time: float = 2.0
    step_timeout: float = 1.0
    load_timeout: float = 10.0


@dataclass(frozen=True)
class SandboxStats:
    """Counts of sandboxes.

    Attributes:
        alive: now.
        started: since the start.
        ended: since the start, by the reason: `unloaded`, or the kind of a `ProcessorFault`.
    """

    alive: int
    started: int
    ended: Mapping[str, int]


class SandboxExecutor:
    """A `ProcessorExecutor` whose processors run in sandboxes: nothing that came with a request runs in this process.

    Args:
        zygote: forks the sandboxes.
        max_rows: most rows of a call.
        vocab_size: width of the logits.
        num_spares: sandboxes that are started before they are needed.
    """

    def __init__(
        self, zygote: ZygoteProcess, limits: SandboxLimits, max_rows: int, vocab_size: int, num_spares: int = 0
    ) -> None:
        self._zygote = zygote
        self._limits = limits
        self._spares = SpareSandboxes(lambda: Sandbox(zygote, max_rows, vocab_size), num_spares)
        self._handles = itertools.count()
        self._sandboxes: set[Sandbox] = set()
        self._unreported: dict[Sandbox, SandboxedProcessor] = {}
        self._counting = threading.Lock()
        self._num_started = 0
        self._ended: Counter[str] = Counter()
        self._under_way: list[SandboxRun] = []
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="logitship-sandboxes", daemon=True)
        self._watcher.start()

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """See `ProcessorExecutor.load`."""
        if not isinstance(string, PickledProcessor | SourceProcessor):
            raise ProcessorLoadError(f"{type(string).__name__} ships no code")
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        sandboxed = SandboxedProcessor(runnable.digest, tenant, _load_message(runnable))
        self._start(sandboxed)
        described = sandboxed.described
        return LoadedProcessor(
            runnable.digest,
            described.name,
            self,
            sandboxed,
            tenant=tenant,
            description=described.description,
            params_schema=described.params_schema,
        )

    def ensure(self, processor: LoadedProcessor) -> None:
        """See `ProcessorExecutor.ensure`."""
        sandboxed: SandboxedProcessor = processor.instance
        self._start(sandboxed)

    def unload(self, processor: LoadedProcessor) -> None:
        """See `ProcessorExecutor.unload`."""
        sandboxed: SandboxedProcessor = processor.instance
        with sandboxed.lock:
            if sandboxed.sandbox is not None:
                self._end(sandboxed.sandbox)

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> SandboxRow:
        """See `ProcessorExecutor.attach`."""
        return SandboxRow(sequence, self._handles)

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> SandboxGroup:
        """See `ProcessorExecutor.group`."""
        return SandboxGroup(self, processor.instance, [row for row in rows if isinstance(row, SandboxRow)])

    def begin(self, sandboxed: SandboxedProcessor, logits: torch.Tensor, members: Sequence[SandboxRow]) -> SandboxRun:
        """Begin a call, see `ExecutorGroup.begin`."""
        run = SandboxRun(sandboxed, logits, self._limits.step_timeout, self._under_way)
        sandbox: Sandbox | SandboxDied
        try:
            # Rows that lost their state with their sandbox need no other one.
            sandbox = (
                self._living(sandboxed) if any(row.sandbox is None for row in members) else sandboxed.current_sandbox
            )
        except SandboxDied as died:
            sandbox = died
        run.begin(sandbox, members)
        return run

    def stats(self) -> SandboxStats:
        """Counts, for the operator. On any thread."""
        with self._counting:
            num_ended = sum(self._ended.values())
            return SandboxStats(self._num_started - num_ended, self._num_started, dict(self._ended))

    def close(self) -> None:
        """End all sandboxes."""
        self._stopped.set()
        self._zygote.close()
        self._spares.close()
        for sandbox in list(self._sandboxes):
            self._end(sandbox)
        self._watcher.join()

    def _start(self, sandboxed: SandboxedProcessor) -> None:
        """Start a processor's sandbox, if it has none that lives. Waits.

        Raises:
            ProcessorLoadError: that is not possible.
        """
        with sandboxed.lock:
            if sandboxed.sandbox is not None and sandboxed.sandbox.check():
                return
            try:
                sandbox = self._spares.take()
            except (OSError, ZygoteError) as error:
                raise ProcessorLoadError(f"no sandbox can be started: {error}") from None
            self._sandboxes.add(sandbox)
            self._unreported[sandbox] = sandboxed
            with self._counting:
                self._num_started += 1
            try:
                sandboxed.described = _loaded(sandbox, sandboxed.load_message, self._limits.load_timeout)
            except ProcessorLoadError:
                self._end(sandbox)
                raise
            if sandboxed.sandbox is not None:
                self._end(sandboxed.sandbox)
            sandboxed.sandbox = sandbox

    def _end(self, sandbox: Sandbox) -> None:
        self._report(sandbox)
        # Before it is closed: the thread that watches would report it as one that died.
        if self._unreported.pop(sandbox, None) is not None:
            self._count_end("unloaded")
        sandbox.close()
        self._sandboxes.discard(sandbox)

    def _report(self, sandbox: Sandbox) -> None:
        """Tell the operator of a sandbox that died, once."""
        if not sandbox.alive and (sandboxed := self._unreported.pop(sandbox, None)) is not None:
            self._count_end(sandbox.death.kind)
            who = f"of tenant {sandboxed.tenant}" if sandboxed.tenant else "of all clients"
            logger.warning(
                "processor %s (%s, %s) %s", sandboxed.name or "?", sandboxed.digest, who, sandbox.death.reason
            )

    def _count_end(self, reason: str) -> None:
        with self._counting:
            self._ended[reason] += 1

    def _living(self, sandboxed: SandboxedProcessor) -> Sandbox:
        """A processor's sandbox. If it died, a step waits for the next one, but no longer than for an answer.

        Raises:
            SandboxDied: there is none.
        """
        if sandboxed.current_sandbox.check():
            return sandboxed.current_sandbox
        try:
            sandboxed.restart = sandboxed.restart or self._revive(sandboxed)
            sandboxed.restart.result(self._limits.step_timeout)
        except FutureTimeout:
            raise SandboxDied("load", "is being loaded again, after its process ended: try again") from None
        # Whatever is in the way of one processor must not end the step of all.
        except Exception as error:
            sandboxed.restart = None
            if not isinstance(error, ProcessorLoadError):
                logger.exception("no sandbox can be started again")
                error = ProcessorLoadError("no sandbox can be started now")
            raise SandboxDied("load", f"could not be loaded again, after its process ended: {error}") from None
        sandboxed.restart = None
        return sandboxed.current_sandbox

    def _revive(self, sandboxed: SandboxedProcessor) -> Future[None]:
        restart: Future[None] = Future()

        def revive() -> None:
            try:
                self._start(sandboxed)
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
                restart.set_exception(error)
            else:
                restart.set_result(None)

        threading.Thread(target=revive, name="logitship-restart", daemon=True).start()
        return restart

    def _watch(self) -> None:
        """Kill sandboxes that compute while nobody asks them for anything, and report those that died."""
        limit = self._limits.cpu_time
        while not self._stopped.wait(WATCH_INTERVAL):
            for sandbox in list(self._sandboxes):
                if sandbox.check() and sandbox.cpu_seconds_outside_calls() > limit:
                    sandbox.kill("cpu_time", f"used over {limit:g} s of CPU between its calls: its process was killed")
                self._report(sandbox)


@dataclass(frozen=True)
class SandboxGroup:
    """A `ExecutorGroup` whose processor runs in a sandbox."""

    executor: SandboxExecutor
    processor: SandboxedProcessor
    rows: Sequence[SandboxRow]

    def begin(self, logits: torch.Tensor) -> SandboxRun:
        """See `ExecutorGroup.begin`."""
        return self.executor.begin(self.processor, logits, self.rows)


def _load_message(string: PickledProcessor | SourceProcessor) -> bytes:
    if isinstance(string, PickledProcessor):
        return marshal.dumps(("pickled", string.payload, string.python))
    return marshal.dumps(("source", string.source, string.class_name, string.captured, string.python))


def _loaded(sandbox: Sandbox, message: bytes, timeout: float) -> ClassDescription:
    """Load a processor in a new sandbox.

    Returns:
        What its class says of itself.

    Raises:
        ProcessorLoadError: it cannot be loaded; says why.
    """
    try:
        sandbox.begin(Command.LOAD, message, timeout)
        answer, body = sandbox.finish()
        if answer is Answer.LOADED:
            return _described(sandbox, body)
        if answer is not Answer.REFUSED:
            raise sandbox.reject_answer()
    except SandboxDied as died:
        raise ProcessorLoadError(f"the processor {died.reason} (while it was loaded)") from None
    raise ProcessorLoadError(scrub(body.decode(errors="replace"))[:LONGEST_TEXT])


def _described(sandbox: Sandbox, body: bytes) -> ClassDescription:
    try:
        return from_bytes(body)
    except ValueError:
        raise sandbox.reject_answer() from None
