"""The processors that run on every request, whatever its client asks for: `--default-processor`, and a tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.client.serialization.processor_string import InstalledProcessor, PickledProcessor, SourceProcessor
from logitship.server.config import ServerConfig
from logitship.server.default_processors import DefaultProcessor
from logitship.server.refusals import RequestRefused, StartError
from logitship.server.requests.messages import ProcessorRequest

from .processor_library import ProcessorLoader
from .request_processors import read_entry
from .uploaded_processors import load_errors_refused


def attached_to_all(config: ServerConfig) -> tuple[ProcessorRequest, ...]:
    """Return the processors that are attached to every request, after its own: the defaults, and the shared tree.

    Raises:
        StartError: a default is malformed.
    """
    try:
        attached = requested_by_default(config.default_processors, config.max_processor_size)
    except ValueError as error:
        raise StartError(str(error)) from error
    if config.tree_decode_config:
        params = {"tree": config.tree_decode_config}
        attached += (ProcessorRequest(InstalledProcessor(TreeLogitsProcessor.name), params, own=True),)
    return attached


def requested_by_default(defaults: Iterable[DefaultProcessor], max_processor_size: int) -> tuple[ProcessorRequest, ...]:
    """Parse the operator's processors as if a request had asked for them.

    Raises:
        ValueError: an entry is malformed.
    """
    return tuple(_parse(default, max_processor_size) for default in defaults)


def _parse(default: DefaultProcessor, max_processor_size: int) -> ProcessorRequest:
    at = f"default_processor: {default.name}"
    try:
        parsed = read_entry(default.entry, at, max_processor_size=max_processor_size)
    except RequestRefused as refused:
        raise ValueError(refused.message) from None
    if not isinstance(parsed, ProcessorRequest):
        raise ValueError(f"{at}: the file has no processor string")
    is_code = isinstance(parsed.string, PickledProcessor | SourceProcessor)
    if is_code != default.is_shipped:
        raise ValueError(f"{at}: the file has no class, but the name of an installed or registered processor")
    return parsed


def digests_of_defaults(attached: Iterable[ProcessorRequest]) -> frozenset[str]:
    """Return the digests of the classes among the processors of every request."""
    strings = [each.string for each in attached]
    runnable = [each.runnable if isinstance(each, PickledProcessor) else each for each in strings]
    return frozenset(each.digest for each in runnable if isinstance(each, PickledProcessor | SourceProcessor))


def check_attached(attached: Sequence[ProcessorRequest], loader: ProcessorLoader) -> None:
    """Load the processors of every request once, so that errors show now instead of at each request.

    Raises:
        StartError: one cannot be loaded, or rejects its parameters.
    """
    for wanted in attached:
        try:
            with load_errors_refused(param=None):
                processor = loader.acquire(wanted.string, tenant="")
                try:
                    loader.prepare(processor, wanted.params, own=wanted.own)
                finally:
                    loader.release(processor)
        except RequestRefused as refused:
            raise StartError(f"a processor of every request cannot run: {refused.message}") from refused
