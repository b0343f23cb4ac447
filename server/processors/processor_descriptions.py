"""Descriptions of installed and registered processors for clients."""

from __future__ import annotations

from hashlib import sha256

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.client.processor import CustomLogitProcessor
from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.processors.class_description import own_summary

from .registration import Registration
from .runnable_source import runnable_text, uploaded_artifacts

_INSTALLED = "it is installed on the server: its code did not come from a client"
_NO_SOURCE = "the processor string holds a pickle and no source"
_CLAIMED = "according to the processor string: what runs is the pickle next to it"
_LISTED = "it does not run: it lacks values that its statements do not recreate; what runs is the pickle next to it"


def installed_digest(name: str) -> str:
    """Return the digest of an installed processor, which has no payload: that of its name."""
    return f"sha256:{sha256(f'installed:{name}'.encode()).hexdigest()}"


def installed_info(name: str, cls: type[CustomLogitProcessor]) -> ProcessorInfo:
    """Describe an installed processor."""
    schema = cls.params_schema
    return ProcessorInfo(
        id=name,
        kind="installed",
        name=name,
        digest=installed_digest(name),
        description=own_summary(cls),
        params_schema=None if schema is None else dict(schema),
        is_mask=issubclass(cls, BuiltinProcessor) and cls.is_mask,
    )


def installed_details(name: str, cls: type[CustomLogitProcessor]) -> ProcessorDetails:
    """Describe an installed processor in detail."""
    return ProcessorDetails(**vars(installed_info(name, cls)), source_note=_INSTALLED)


def registered_info(registration: Registration) -> ProcessorInfo:
    """Describe a registered processor."""
    upload = registration.upload
    return ProcessorInfo(
        id=registration.id,
        kind="registered",
        name=upload.name,
        version=registration.version,
        digest=upload.digest,
        description=upload.description,
        params_schema=upload.params_schema,
        form=_form(upload.string),
        python=upload.string.python if isinstance(upload.string, PickledProcessor | SourceProcessor) else None,
        size=registration.size,
        created=registration.created,
    )


def registered_details(registration: Registration) -> ProcessorDetails:
    """Describe a registered processor with its source."""
    string = registration.upload.string
    source, note = _source(string)
    return ProcessorDetails(
        **vars(registered_info(registration)),
        source=source,
        class_name=_class_name(string) if source is not None else None,
        source_note=note,
    )


def _form(string: ProcessorString) -> str:
    match string:
        case PickledProcessor():
            return "pickled"
        case SourceProcessor():
            return "source"
        case _:
            return "installed"


def _source(string: ProcessorString) -> tuple[str | None, str | None]:
    """Return the source in a string, and a note about it."""
    if isinstance(string, SourceProcessor):
        return runnable_text(string), _files_note(string) or None
    if not isinstance(string, PickledProcessor):
        return None, _INSTALLED
    if string.source is not None:
        return runnable_text(string.source), "; ".join(filter(None, (_CLAIMED, _files_note(string.source))))
    return (None, _NO_SOURCE) if string.listing is None else (string.listing.text, _LISTED)


def _files_note(source: SourceProcessor) -> str:
    """Return a note on the files that the source reads; "" if it reads none."""
    files = uploaded_artifacts(source)
    return f"to run the source, write these artifacts to files of that name: {', '.join(files)}" if files else ""


def _class_name(string: ProcessorString) -> str | None:
    if isinstance(string, PickledProcessor):
        return string.name if string.source is None else string.source.class_name
    return string.class_name if isinstance(string, SourceProcessor) else None
