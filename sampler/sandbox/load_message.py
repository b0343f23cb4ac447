"""The body of LOAD: the parts of a processor string."""

from __future__ import annotations

import marshal
from dataclasses import astuple

from logitship.client.serialization.artifact import Artifact, ArtifactBytes, bytes_of
from logitship.client.serialization.processor_string import LineRange, Listing, PickledProcessor, SourceProcessor


def load_message(string: PickledProcessor | SourceProcessor) -> bytes:
    """Return the body of LOAD for a processor.

    Raises:
        ProcessorLoadError: an artifact that it uses is not here.
    """
    if isinstance(string, SourceProcessor):
        form = ("source", string.source, string.class_name, string.captured, string.python)
        return marshal.dumps((bytes_of(string.artifacts), *form))
    listing = string.listing
    lines = None if listing is None else (listing.text, tuple(map(astuple, listing.ranges)))
    return marshal.dumps((bytes_of(string.artifacts), "pickled", string.payload, string.python, lines))


def shipped_string(body: bytes) -> PickledProcessor | SourceProcessor:
    """Read the body of LOAD."""
    contents, form, *parts = marshal.loads(body)
    artifacts = tuple(Artifact(digest, ArtifactBytes(data)) for digest, data in contents.items())
    if form == "source":
        source, class_name, captured, python = parts
        return SourceProcessor(source, class_name, captured, python, artifacts)
    payload, python, lines = parts
    listing = None if lines is None else Listing(lines[0], tuple(LineRange(*each) for each in lines[1]))
    return PickledProcessor(payload, python, listing=listing, artifacts=artifacts)
