"""Serialization of a class to a processor string."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from logitship.client.errors import ProcessorLoadError, ProcessorSerializationError
from logitship.client.params_schema import InvalidSchema, check_schema

from .artifact import Artifact, bytes_of
from .call_signature import signature_mistake
from .processor_base import ProcessorBase, processor_class
from .processor_string import MAX_ARTIFACTS, PYTHON, PickledProcessor, SourceProcessor
from .provenance import SERVER_PACKAGES, top_level
from .syntax import signature_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


_SHARED_SIZE = 1 << 10
"""Bytes of a tensor or array from which on it is sent once, in the pickle of the class, and the source refers to it."""


def serialize(cls: type[ProcessorBase], *, artifact_size: int | None = None) -> PickledProcessor:
    """Serialize a processor class by value, with its source if it can be captured.

    Args:
        cls: the class.
        artifact_size: bytes of a tensor or array from which on it becomes an artifact; None: none does.

    Raises:
        ProcessorSerializationError: the class is not a processor, or uses something that cannot be serialized.
    """
    _check_processor(cls)
    from logitship.client.serialization.source.source_capture import capture_source

    payload, artifacts = _dump(cls, artifact_size)
    source, listing = capture_source(cls, own_packages(cls), artifact_size=_SHARED_SIZE)
    if source is not None and not _are_in(payload, artifacts, source):
        source, listing = capture_source(cls, own_packages(cls))
    return PickledProcessor(
        payload=payload,
        python=PYTHON,
        dill=version("dill"),
        source=source,
        params_schema=_params_schema(cls),
        name=cls.__name__,
        listing=listing,
        artifacts=artifacts,
    )


def _are_in(payload: bytes, artifacts: Collection[Artifact], source: SourceProcessor) -> bool:
    """Return whether the pickle has the bytes of all artifacts of the source, or refers to them too."""
    used = [each for each in source.artifacts if each not in artifacts]
    contents = bytes_of(used).values()
    is_short = len(used) <= MAX_ARTIFACTS and sum(map(len, contents)) <= len(payload)
    return is_short and all(data in payload for data in contents)


def dump_class(cls: type) -> bytes:
    """Pickle a class by value, wherever it was defined, with all of the author's code that it uses.

    `dill.loads` (0.4 or newer) reads it in a process that has neither the author's modules nor logitship. A class
    with a counterpart in SGLang (`CustomLogitProcessor`, SGLang's built-ins) is pickled as the name of that one.

    Raises:
        ProcessorSerializationError: something cannot be serialized; the message names it and says where it is used.
    """
    return _dump(cls, None)[0]


def _dump(cls: type, artifact_size: int | None) -> tuple[bytes, tuple[Artifact, ...]]:
    from logitship.client.serialization.pickling.class_pickler import ClassPickler

    from .loading import check_payload

    file = io.BytesIO()
    pickler = ClassPickler(file, own_packages(cls), artifact_size=artifact_size)
    pickler.dump_class(cls)
    payload, artifacts = file.getvalue(), tuple(pickler.artifacts.values())
    try:
        # Some objects pickle and then fail to load: report that here, not on the server.
        check_payload(payload, artifacts)
    except ProcessorLoadError as error:
        raise ProcessorSerializationError(
            f"class {cls.__qualname__} does not load after it is serialized: {error}"
        ) from None
    return payload, artifacts


def own_packages(cls: type) -> frozenset[str]:
    """Return the packages pickled by value even if installed: the server need not have the class's own package."""
    processor = processor_class()
    bases = [base for base in cls.__mro__ if issubclass(base, processor) and base is not processor]
    return frozenset(top_level(base.__module__) for base in bases) - SERVER_PACKAGES - sys.stdlib_module_names


def _check_processor(cls: type[ProcessorBase]) -> None:
    abstract = sorted(getattr(cls, "__abstractmethods__", ()))
    if abstract:
        raise ProcessorSerializationError(f"class {cls.__qualname__} is abstract: it lacks {', '.join(abstract)}")
    if mistake := signature_mistake(cls):
        raise ProcessorSerializationError(f"class {cls.__qualname__} cannot be called by a server: {mistake}")
    try:
        with contextlib.suppress(ValueError):  # classes that derive from some of those written in C have no signature
            signature_of(cls).bind()
    except TypeError as error:
        raise ProcessorSerializationError(
            f"class {cls.__qualname__} cannot be created without arguments ({error}): the server creates the instance. "
            "Take the values from custom_params, or give the arguments of __init__ defaults"
        ) from None


def _params_schema(cls: type[Any]) -> dict[str, Any] | None:
    schema: Mapping[str, Any] | None = cls.params_schema
    if schema is not None and not isinstance(schema, dict):
        raise ProcessorSerializationError(f"{cls.__qualname__}.params_schema is not a dict but {type(schema).__name__}")
    if schema is not None:
        try:
            check_schema(schema)
        except InvalidSchema as error:
            raise ProcessorSerializationError(f"class {cls.__qualname__}: {error}") from None
    return schema
