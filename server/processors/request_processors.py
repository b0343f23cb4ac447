"""The processors that requests attach, name and register: parsed from JSON, then loaded.

An entry of the list `logits_processors` is one of:

```
{"processor": <processor string, or its JSON object>, "params": {…}}     a processor, with its own parameters
{"qualname": "module.Class", "args": […], "kwargs": {…}}                 a request-level callable on the server
"module.function"                                                        the same, without constructor arguments
```

Parsing loads nothing. Every error is a refusal.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from logitship.client.errors import LARGE_PROCESSOR_ADVICE, ProcessorLoadError
from logitship.client.serialization import processor_string
from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, RegisteredProcessor
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.server.refusals import (
    BadRequest,
    RequestTooLarge,
)
from logitship.server.requests.body_limits import MAX_DEPTH, scan_json
from logitship.server.requests.fair_pool import FairPool
from logitship.server.requests.messages import AttachedProcessor, CallableRequest, GenerationRequest, ProcessorRequest

from .load_queue import LoadQueue, LoadStats
from .processor_library import ProcessorLibrary
from .uploaded_processors import UploadedProcessors, load_errors_refused

if TYPE_CHECKING:  # the plugins import this module, and engines configure `prometheus_client` before its import
    from prometheus_client import Histogram

RESERVED_KEY = "__req__"
"""Key of the request among the parameters that a processor gets."""

_MAX_ELEMENTS = 1000
"""Most keys and values of a processor string, see `scan_json`. Those that `to_str()` makes have fewer than ten."""


def read_entries(
    entries: Sequence[Any], at: str, *, max_processor_size: int, params: Mapping[str, Any] | None = None
) -> tuple[AttachedProcessor, ...]:
    """Parse the list `logits_processors`, in the order in which they run.

    Args:
        entries: the list.
        at: path of the list in the request.
        max_processor_size: longest processor string, in bytes.
        params: parameters of entries without their own: the request's `custom_params`.

    Raises:
        BadRequest: an entry is malformed; names it.
        RequestTooLarge: a processor string is over the limit.
    """
    return tuple(
        read_entry(entry, f"{at}[{index}]", max_processor_size=max_processor_size, params=params)
        for index, entry in enumerate(entries)
    )


def read_entry(
    entry: Any, at: str, *, max_processor_size: int, params: Mapping[str, Any] | None = None
) -> AttachedProcessor:
    """Parse one entry, see `read_entries`."""
    if isinstance(entry, str):
        return CallableRequest(_qualname(entry, at))
    if not isinstance(entry, Mapping):
        raise BadRequest(f"{at}: must be an object with 'processor' or 'qualname', or a qualified name", param=at)
    if "qualname" in entry:
        return _read_callable(entry, at)
    _only(entry, at, "processor", "params")
    if entry.get("processor") is None:
        raise BadRequest(f"{at}: has neither 'processor' nor 'qualname'", param=at)
    own = entry.get("params")
    if own is not None and not isinstance(own, Mapping):
        raise BadRequest(f"{at}.params: must be an object", param=f"{at}.params")
    if RESERVED_KEY in (own or {}):
        raise BadRequest(f"{at}.params: the key {RESERVED_KEY!r} is the server's own", param=f"{at}.params")
    string = _parse(entry["processor"], max_processor_size, f"{at}.processor")
    if own is not None:
        return ProcessorRequest(string, own, own=True)
    return ProcessorRequest(string, params)


def read_processor(
    value: Any, params: Mapping[str, Any] | None, at: str, *, max_processor_size: int
) -> ProcessorRequest:
    """Parse a processor string, or its JSON object.

    Raises:
        BadRequest: it is neither, or has none of the four forms.
        RequestTooLarge: it is over the limit.
    """
    return ProcessorRequest(_parse(value, max_processor_size, at), params)


def _read_callable(entry: Mapping[str, Any], at: str) -> CallableRequest:
    _only(entry, at, "qualname", "args", "kwargs")
    args, kwargs = entry.get("args"), entry.get("kwargs")
    if args is not None and not isinstance(args, list):
        raise BadRequest(f"{at}.args: must be a list", param=f"{at}.args")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise BadRequest(f"{at}.kwargs: must be an object", param=f"{at}.kwargs")
    qualname = _qualname(entry["qualname"], f"{at}.qualname")
    return CallableRequest(qualname, tuple(args or ()), dict(kwargs or {}))


def _qualname(value: Any, at: str) -> str:
    if isinstance(value, str) and value and not value.lstrip().startswith("{"):
        return value
    raise BadRequest(
        f"{at}: must be the qualified name of a callable, such as 'module.Class' (a processor string goes into an "
        "object's 'processor')",
        param=at,
    )


def _only(entry: Mapping[str, Any], at: str, *known: str) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise BadRequest(f"{at}: has an unknown key {unknown[0][:80]!r}; the keys are {', '.join(known)}", param=at)


def _parse(value: Any, limit: int, at: str) -> ProcessorString:
    if not isinstance(value, str | dict):
        raise BadRequest(f"{at}: must be a processor string or its JSON object", param=at)
    text = value.encode() if isinstance(value, str) else _dumps(value, at)
    if len(text) > limit:
        raise RequestTooLarge(
            f"{at}: the processor string has {len(text)} bytes, this server takes at most {limit} "
            f"(max_processor_size; {LARGE_PROCESSOR_ADVICE})",
            param=at,
        )
    if isinstance(value, str):
        check_processor_text(text, at)
    try:
        return processor_string.parse(text)
    except ProcessorLoadError as error:
        raise BadRequest(f"{at}: {error}", param=at) from None


def check_processor_text(text: bytes, at: str | None = None) -> None:
    """Refuse a processor string with far too many keys and values, before anything is built of it.

    Args:
        text: the processor string, JSON.
        at: path of the field; None: the whole body.

    Raises:
        BadRequest: it has too many, or nests too deeply.
    """
    scan = scan_json(text, _MAX_ELEMENTS)
    if scan.elements > _MAX_ELEMENTS or scan.max_depth > MAX_DEPTH:
        reason = "is not a processor string: it has hundreds of keys and values"
        raise BadRequest(f"{at}: {reason}" if at else f"the request body {reason}", param=at)


def _dumps(value: dict[str, Any], at: str) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:  # orjson parses deeper nesting than it writes
        raise BadRequest(f"{at}: {error}", param=at) from None


class RequestProcessors(UploadedProcessors):
    """Loads, registers and lists processors for requests. Errors are refusals that name the request's field.

    Args:
        library: the processors.
        loads: loads the shipped ones.
        load_time: histogram of the load time of each of a request's processors.
        pool: hashes artifacts, and loads installed processors.
    """

    def __init__(self, library: ProcessorLibrary, loads: LoadQueue, load_time: Histogram, pool: FairPool) -> None:
        super().__init__(library, loads, pool)
        self._load_time = load_time

    def load_stats(self) -> LoadStats:
        """Return the numbers of loads of shipped processors."""
        return self._loads.stats()

    def check_callable(self, wanted: CallableRequest) -> None:
        """Refuse a callable whose name the operator did not allow.

        Raises:
            ProcessorLoadError: it is not allowed; the message names the flag.
        """
        self._library.callables.check_allowed(wanted.target)

    def pin(self, request: GenerationRequest, pins: dict[ProcessorString, ProcessorString]) -> GenerationRequest:
        """Return the request with the names of its processors resolved.

        Otherwise `submit` resolves them for each request, and requests of a batch may get different versions.

        Args:
            request: the request.
            pins: names that were resolved for the same batch before; new ones are added.

        Raises:
            BadRequest: no processor has that name; `param` is `processors[i]`.
        """
        processors = list(request.processors)
        for index, wanted in enumerate(processors):
            if isinstance(wanted, ProcessorRequest) and isinstance(
                wanted.string, RegisteredProcessor | InstalledProcessor
            ):
                with load_errors_refused(param=f"processors[{index}]"):
                    pins[wanted.string] = pins.get(wanted.string) or self._library.names.resolve(
                        wanted.string, request.tenant
                    )
                processors[index] = dataclasses.replace(wanted, string=pins[wanted.string])
        return dataclasses.replace(request, processors=tuple(processors))

    async def load_shipped(self, request: GenerationRequest, held: list[LoadedProcessor]) -> dict[int, LoadedProcessor]:
        """Load the request's shipped processors. Cancelling it leaves the queue of loads.

        Args:
            request: the request.
            held: each processor is added as soon as it is loaded; the caller gives them back with `release`.

        Returns:
            The processors by their index in the request.

        Raises:
            RequestRefused: a processor cannot be loaded.
        """
        shipped: dict[int, LoadedProcessor] = {}
        for index, wanted in enumerate(request.processors):
            if isinstance(wanted, CallableRequest):
                continue
            with load_errors_refused(param=f"processors[{index}]"):
                found = self._library.find(wanted.string, request.tenant)
                if not isinstance(found, InstalledProcessor):
                    with self._load_time.time():
                        shipped[index] = await self._loads.acquire(found, request.tenant)
                    held.append(shipped[index])
        return shipped

    def load(
        self, request: GenerationRequest, held: list[LoadedProcessor], shipped: Mapping[int, LoadedProcessor]
    ) -> list[list[ProcessorUse]]:
        """Load the request's other processors, and return the uses of each sequence in order.

        Blocks, unless all processors are shipped, and none has a `params_schema`.

        Args:
            request: the request.
            held: each processor is added as soon as it is loaded; the caller gives them back with `release`.
            shipped: what `load_shipped` returned.

        Raises:
            RequestRefused: a processor cannot be loaded, or rejects its parameters.
        """
        uses: list[list[ProcessorUse]] = [[] for _ in range(request.num_started)]
        prepared: dict[tuple[int, int], Any] = {}
        for index, wanted in enumerate(request.processors):
            loaded = shipped.get(index)
            timer = contextlib.nullcontext() if loaded is not None else self._load_time.time()
            with timer, load_errors_refused(param=f"processors[{index}]"):
                for sequence_uses, use in zip(uses, self._uses(request, held, wanted, loaded, prepared), strict=True):
                    sequence_uses.append(use)
        return uses

    def release(self, held: list[LoadedProcessor]) -> None:
        """Give back the processors that `load` added to `held`."""
        for processor in held:
            self._library.release(processor)

    def _uses(
        self,
        request: GenerationRequest,
        held: list[LoadedProcessor],
        wanted: AttachedProcessor,
        processor: LoadedProcessor | None,
        prepared: dict[tuple[int, int], Any],
    ) -> list[ProcessorUse]:
        """Return a use for each sequence, of the same processor, or of its own callable.

        Args:
            request: the request.
            held: see `load`.
            wanted: the processor or callable.
            processor: the processor if it is shipped, and so loaded already.
            prepared: results of `prepare` for this request so far, by the identities of processor and parameters.
        """
        if isinstance(wanted, CallableRequest):
            made = [self._library.callables.make(wanted) for _ in range(request.num_started)]
            return [ProcessorUse(callable_, {}, request.rid) for callable_ in made]
        if processor is None:
            processor = self._library.acquire(wanted.string, request.tenant)
            held.append(processor)
        key = id(processor), id(wanted.params)
        if key not in prepared:
            prepared[key] = self._library.prepare(
                processor,
                wanted.params,
                tenant=request.tenant,
                own=wanted.own,
                in_beams=request.beam_search is not None,
            )
        params = dict(wanted.params or {})
        return [ProcessorUse(processor, params, request.rid, prepared[key]) for _ in range(request.num_started)]
