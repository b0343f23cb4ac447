"""Runs each shipped processor in a sandbox of its own."""

from __future__ import annotations

import itertools
import logging
import marshal
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, fields

import orjson
import torch

from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.client.scrub import scrub
from logitship.sampler.processor_host import HostedRow, HostedSequence, LoadedProcessor, RunOutcome
from logitship.sampler.sampling_params import SamplingParams

from .protocol import Answer, Kind, StepRow, pack_step
from .sandbox import Sandbox, SandboxDied, wait_for_any
from .template_process import TemplateError, TemplateProcess

logger = logging.getLogger(__name__)

_LONGEST_NAME = 200
_LONGEST_TEXT = 8192
"""Characters of what a sandbox says."""

WATCH_INTERVAL = 0.25
"""Seconds between two looks at what the sandboxes do while nobody asks them for anything."""


@dataclass(frozen=True)
class SandboxLimits:
    """What a sandbox may take, beside memory, which the template limits.

    Attributes:
        cpu_time: CPU seconds outside its calls.
        step_timeout: seconds that a call may last.
        load_timeout: seconds that loading may last.
    """

    cpu_time: float = 2.0
    step_timeout: float = 1.0
    load_timeout: float = 10.0


class _Place:
    """Where a processor runs: in one sandbox after the other, if it kills them.

    Attributes:
        digest: the processor's identity.
        tenant: whose it is.
        load_message: the body of LOAD.
        lock: held while a sandbox is started.
        sandbox: the last one that was started; None until there was one.
        name: the class's name.
        revival: a thread that starts the next one, on behalf of a step.
    """

    def __init__(self, digest: str, tenant: str, load_message: bytes) -> None:
        self.digest = digest
        self.tenant = tenant
        self.load_message = load_message
        self.lock = threading.Lock()
        self.sandbox: Sandbox | None = None
        self.name = ""
        self.revival: Future[None] | None = None

    @property
    def living_or_last(self) -> Sandbox:
        """Its sandbox, after the first was started."""
        assert self.sandbox is not None
        return self.sandbox

    def fault(self, died: SandboxDied) -> ProcessorFault:
        """What its rows are told of the end of its sandbox."""
        return self.fault_of(died.kind, died.reason)

    def fault_of(self, kind: str, reason: str) -> ProcessorFault:
        """A fault of this processor, for a reason that goes on a sentence."""
        return self.told_fault(kind, f"processor {self.name} {reason}", "")

    def told_fault(self, kind: str, message: str, traceback: str) -> ProcessorFault:
        """A fault of this processor, in the words of its sandbox."""
        return ProcessorFault(message, digest=self.digest, name=self.name, kind=kind, traceback=traceback)


class SandboxRow:
    """A sequence whose processor runs in a sandbox.

    Attributes:
        sequence: what the engine says of it.
        handle: its number in the sandbox.
        sandbox: the one that knows it; None until its first call.
        num_known: how many of its output tokens that one knows.
    """

    def __init__(self, sequence: HostedSequence, handle: int) -> None:
        self.sequence = sequence
        self.handle = handle
        self.sandbox: Sandbox | None = None
        self.num_known = 0

    def sync(self) -> None:
        """See `HostedRow.sync`: the tokens travel with the next call."""

    def close(self) -> None:
        """See `HostedRow.close`."""
        if self.sandbox is not None and self.sandbox.alive:
            self.sandbox.tell(Kind.DETACH, marshal.dumps(self.handle))
            self.sandbox.flush()  # there may be no other call: the sequence's state goes now

    def attach_message(self) -> bytes:
        """The body of ATTACH.

        Raises:
            ValueError: the parameters are not plain values.
        """
        sequence = self.sequence
        self.num_known = len(sequence.output_token_ids)
        return marshal.dumps(
            (
                self.handle,
                sequence.rid,
                dict(sequence.params),
                array("q", sequence.prompt_token_ids).tobytes(),
                array("q", sequence.output_token_ids).tobytes(),
                {name: getattr(sequence.sampling_params, name) for name in _SAMPLING_FIELDS},
            )
        )

    def new_tokens(self) -> list[int]:
        """The output tokens that the sandbox has not been told yet. From now on they count as told."""
        tokens = self.sequence.output_token_ids[self.num_known :]
        self.num_known += len(tokens)
        return tokens


_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name != "processors")


class SandboxHost:
    """A `ProcessorHost` whose processors run in sandboxes: nothing that came with a request runs in this process.

    Args:
        template: forks the sandboxes.
        max_rows: most rows of a call.
        vocab_size: width of the logits.
    """

    def __init__(self, template: TemplateProcess, limits: SandboxLimits, max_rows: int, vocab_size: int) -> None:
        self._template = template
        self._limits = limits
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._handles = itertools.count()
        self._sandboxes: set[Sandbox] = set()
        self._unreported: dict[Sandbox, _Place] = {}
        self._under_way: list[_SandboxRun] = []
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="logitship-sandboxes", daemon=True)
        self._watcher.start()

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """See `ProcessorHost.load`."""
        if not isinstance(string, PickledProcessor | SourceProcessor):
            raise ProcessorLoadError(f"{type(string).__name__} ships no code")
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        place = _Place(runnable.digest, tenant, _load_message(runnable))
        self._start(place)
        return LoadedProcessor(runnable.digest, place.name, self, place, tenant=tenant)

    def ensure(self, processor: LoadedProcessor) -> None:
        """See `ProcessorHost.ensure`."""
        place: _Place = processor.instance
        self._start(place)

    def unload(self, processor: LoadedProcessor) -> None:
        """See `ProcessorHost.unload`."""
        place: _Place = processor.instance
        with place.lock:
            if place.sandbox is not None:
                self._end(place.sandbox)

    def attach(self, processor: LoadedProcessor, sequence: HostedSequence) -> SandboxRow:
        """See `ProcessorHost.attach`."""
        return SandboxRow(sequence, next(self._handles))

    def begin(self, processor: LoadedProcessor, logits: torch.Tensor, rows: Sequence[HostedRow]) -> _SandboxRun:
        """See `ProcessorHost.begin`."""
        place: _Place = processor.instance
        run = _SandboxRun(place, logits, self._limits.step_timeout, self._under_way)
        members = [row for row in rows if isinstance(row, SandboxRow)]
        sandbox: Sandbox | SandboxDied
        try:
            # Rows that lost their state with their sandbox need no other one.
            sandbox = self._living(place) if any(row.sandbox is None for row in members) else place.living_or_last
        except SandboxDied as died:
            sandbox = died
        run.begin(sandbox, members)
        return run

    def close(self) -> None:
        """End all sandboxes."""
        self._stopped.set()
        self._template.close()
        for sandbox in list(self._sandboxes):
            self._end(sandbox)
        self._watcher.join()

    def _start(self, place: _Place) -> None:
        """Start a place's sandbox, if it has none that lives. Waits.

        Raises:
            ProcessorLoadError: that is not possible.
        """
        with place.lock:
            if place.sandbox is not None and place.sandbox.check():
                return
            try:
                sandbox = Sandbox(self._template, self._max_rows, self._vocab_size)
            except (OSError, TemplateError) as error:
                raise ProcessorLoadError(f"no sandbox can be started: {error}") from None
            self._sandboxes.add(sandbox)
            self._unreported[sandbox] = place
            try:
                place.name = _loaded(sandbox, place.load_message, self._limits.load_timeout)
            except ProcessorLoadError:
                self._end(sandbox)
                raise
            if place.sandbox is not None:
                self._end(place.sandbox)
            place.sandbox = sandbox

    def _end(self, sandbox: Sandbox) -> None:
        self._report(sandbox)
        sandbox.close()
        self._sandboxes.discard(sandbox)
        self._unreported.pop(sandbox, None)

    def _report(self, sandbox: Sandbox) -> None:
        """Tell the operator of a sandbox that died, once."""
        if not sandbox.alive and (place := self._unreported.pop(sandbox, None)) is not None:
            who = f"of tenant {place.tenant}" if place.tenant else "of all clients"
            logger.warning("processor %s (%s, %s) %s", place.name or "?", place.digest, who, sandbox.death.reason)

    def _living(self, place: _Place) -> Sandbox:
        """A place's sandbox. If it died, a step waits for the next one, but no longer than for an answer.

        Raises:
            SandboxDied: there is none.
        """
        if place.living_or_last.check():
            return place.living_or_last
        try:
            place.revival = place.revival or self._revive(place)
            place.revival.result(self._limits.step_timeout)
        except FutureTimeout:
            raise SandboxDied("load", "is being loaded again, after its process ended: try again") from None
        # Whatever is in the way of one processor must not end the step of all.
        except Exception as error:
            place.revival = None
            if not isinstance(error, ProcessorLoadError):
                logger.exception("no sandbox can be started again")
                error = ProcessorLoadError("no sandbox can be started now")
            raise SandboxDied("load", f"could not be loaded again, after its process ended: {error}") from None
        place.revival = None
        return place.living_or_last

    def _revive(self, place: _Place) -> Future[None]:
        revival: Future[None] = Future()

        def revive() -> None:
            try:
                self._start(place)
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
                revival.set_exception(error)
            else:
                revival.set_result(None)

        threading.Thread(target=revive, name="logitship-revive", daemon=True).start()
        return revival

    def _watch(self) -> None:
        """Kill sandboxes that compute while nobody asks them for anything, and report those that died."""
        limit = self._limits.cpu_time
        while not self._stopped.wait(WATCH_INTERVAL):
            for sandbox in list(self._sandboxes):
                if sandbox.check() and sandbox.cpu_seconds_outside_calls() > limit:
                    sandbox.kill("cpu_time", f"used over {limit:g} s of CPU between its calls: its process was killed")
                self._report(sandbox)


class _SandboxRun:
    """A call of a sandbox that was begun. See `Run`.

    Args:
        logits: float32 [rows, vocab]; edited in place when the call is finished.
        under_way: all runs that wait for an answer. Whoever waits for one serves them all, so that none misses its
            deadline because another does.
    """

    def __init__(self, place: _Place, logits: torch.Tensor, timeout: float, under_way: list[_SandboxRun]) -> None:
        self._place = place
        self._logits = logits
        self._timeout = timeout
        self._under_way = under_way
        self._faults: dict[int, ProcessorFault] = {}
        self._sandbox: Sandbox | None = None
        self._places: list[int] = []
        self._answer: tuple[Answer, bytes] | None = None
        self._is_retry = False
        self._began = self._ended = time.perf_counter()

    def fail(self, places: Sequence[int], died: SandboxDied) -> None:
        """Give rows the fault of a sandbox that died."""
        self._faults |= dict.fromkeys(places, self._place.fault(died))

    def begin(self, sandbox: Sandbox | SandboxDied, rows: Sequence[SandboxRow]) -> None:
        """Copy the rows into the region, and ask."""
        steps = []
        for place, row in enumerate(rows):
            if row.sandbox is None:
                if isinstance(sandbox, SandboxDied):
                    self.fail([place], sandbox)
                    continue
                try:
                    sandbox.tell(Kind.ATTACH, row.attach_message())
                except ValueError as error:
                    self._faults[place] = self._place.fault_of("exception", f"cannot be given its parameters: {error}")
                    continue
                row.sandbox = sandbox
            elif row.sandbox is not sandbox:  # its state died with another sandbox
                self.fail([place], row.sandbox.death)
                continue
            self._places.append(place)
            steps.append(StepRow(row.handle, row.new_tokens()))
        if steps:
            assert isinstance(sandbox, Sandbox)
            self._sandbox = sandbox
            # One whose step was given up before it was finished: asking again ends that call, and the sandbox.
            self._under_way[:] = [run for run in self._under_way if run._sandbox is not sandbox]
            self._ask(Kind.STEP, pack_step(steps), self._timeout)

    def finish(self) -> RunOutcome:
        """See `Run.finish`."""
        while self in self._under_way:
            for run in list(self._under_way):
                run.advance()
            if self in self._under_way:
                wait_for_any([run._sandbox for run in self._under_way if run._sandbox is not None])
        if self._answer is not None:
            try:
                self._take(*self._answer)
            except SandboxDied as died:
                self.fail(self._places, died)
        return RunOutcome(self._ended - self._began, self._faults)

    def advance(self) -> None:
        """Take note of the answer, if it is here. Never waits."""
        assert self._sandbox is not None
        try:
            answer = self._sandbox.advance()
        except SandboxDied as died:
            self._under_way.remove(self)
            self.fail(self._places, died)
            return
        if answer is None:
            return
        self._under_way.remove(self)
        self._ended = time.perf_counter()
        if answer[0] is Answer.AGAIN and not self._is_retry:
            self._is_retry = True
            self._ask(Kind.RETRY, b"", self._began + self._timeout - self._ended)
        else:
            self._answer = answer

    def _ask(self, kind: Kind, body: bytes, timeout: float) -> None:
        assert self._sandbox is not None
        try:
            self._copy_in()
            self._sandbox.begin(kind, body, timeout)
        except SandboxDied as died:
            self.fail(self._places, died)
        else:
            self._under_way.append(self)

    def _copy_in(self) -> None:
        assert self._sandbox is not None
        everything = len(self._places) == len(self._logits)
        rows = self._logits if everything else self._logits[self._places]
        self._sandbox.logits[: len(self._places)].copy_(rows)

    def _take(self, answer: Answer, body: bytes) -> None:
        assert self._sandbox is not None
        if answer is Answer.FAULTS:
            try:
                told = _read_faults(body, self._place, len(self._places))
            except ValueError:
                raise self._sandbox.distrust() from None
            self._faults |= {self._places[row]: fault for row, fault in told.items()}
        elif answer is not Answer.DONE:
            raise self._sandbox.distrust()
        self._copy_out()

    def _copy_out(self) -> None:
        assert self._sandbox is not None
        result = self._sandbox.logits[: len(self._places)]
        # A copy: from here on, what the sandbox does to the region changes nothing.
        if len(self._places) == len(self._logits):
            self._logits.copy_(result)
        else:
            self._logits[self._places] = result.to(self._logits.device)


def _load_message(string: PickledProcessor | SourceProcessor) -> bytes:
    if isinstance(string, PickledProcessor):
        return marshal.dumps(("pickled", string.payload, string.python))
    return marshal.dumps(("source", string.source, string.class_name, string.captured, string.python))


def _loaded(sandbox: Sandbox, message: bytes, timeout: float) -> str:
    """Load a processor in a new sandbox.

    Returns:
        The class's name.

    Raises:
        ProcessorLoadError: it cannot be loaded; says why.
    """
    try:
        sandbox.begin(Kind.LOAD, message, timeout)
        answer, body = sandbox.finish()
        if answer not in (Answer.LOADED, Answer.REFUSED):
            raise sandbox.distrust()
    except SandboxDied as died:
        raise ProcessorLoadError(f"the processor {died.reason} (while it was loaded)") from None
    text = scrub(body.decode(errors="replace"))
    if answer is Answer.REFUSED:
        raise ProcessorLoadError(text[:_LONGEST_TEXT])
    return "".join(text.split())[:_LONGEST_NAME] or "?"


def _read_faults(body: bytes, place: _Place, num_rows: int) -> dict[int, ProcessorFault]:
    """The faults that a sandbox tells of, by row of the call.

    Raises:
        ValueError: it is not what a worker tells.
    """
    told = orjson.loads(body)  # its error is a ValueError too
    if not isinstance(told, list) or not told:
        raise ValueError("no list of faults")
    faults: dict[int, ProcessorFault] = {}
    for each in told:
        match each:
            case [[*rows], "exception" | "bad_result" as kind, str(message), str(traceback)] if all(
                type(row) is int and 0 <= row < num_rows for row in rows
            ):
                fault = place.told_fault(kind, scrub(message)[:_LONGEST_TEXT], scrub(traceback)[-_LONGEST_TEXT:])
                faults |= dict.fromkeys(rows, fault)
            case _:
                raise ValueError("not a fault")
    return faults
