"""`params_schema`: a JSON Schema of a processor's parameters, as the author of the class gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

MAX_SCHEMA_BYTES = 1 << 15
"""Maximum number of bytes of JSON."""


class InvalidSchema(ValueError):
    """A `params_schema` cannot be sent; the message says why."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check that a schema can be sent. The server checks that it is one.

    Raises:
        InvalidSchema: it is not JSON, or too large.
    """
    try:
        size = len(orjson.dumps(schema))
    except orjson.JSONEncodeError as error:
        raise InvalidSchema(f"params_schema: not JSON: {error}") from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidSchema(f"params_schema: {size} bytes of JSON, at most {MAX_SCHEMA_BYTES} are allowed")


def as_json_schema(declared: Any) -> Any:
    """Return the JSON Schema of a pydantic model, and everything else unchanged."""
    to_schema = getattr(declared, "model_json_schema", None)
    return to_schema() if isinstance(declared, type) and callable(to_schema) else declared
