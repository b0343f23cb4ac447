"""The body of LOAD: the parts of a processor string."""

from __future__ import annotations

import marshal
from dataclasses import astuple

from logitship.client.serialization.processor_string import LineRange, Listing, PickledProcessor, SourceProcessor


def load_message(string: PickledProcessor | SourceProcessor) -> bytes:
    """Return the body of LOAD for a processor."""
    if isinstance(string, SourceProcessor):
        return marshal.dumps(("source", string.source, string.class_name, string.captured, string.python))
    listing = string.listing
    lines = None if listing is None else (listing.text, tuple(map(astuple, listing.ranges)))
    return marshal.dumps(("pickled", string.payload, string.python, lines))


def shipped_string(body: bytes) -> PickledProcessor | SourceProcessor:
    """Read the body of LOAD."""
    form, *parts = marshal.loads(body)
    if form == "source":
        return SourceProcessor(*parts)
    payload, python, lines = parts
    listing = None if lines is None else Listing(lines[0], tuple(LineRange(*each) for each in lines[1]))
    return PickledProcessor(payload, python, listing=listing)
