"""The media types of bodies."""

from __future__ import annotations

from starlette.datastructures import Headers

from logitship.server.refusals import UnsupportedMediaType

_BINARY_PATH = "/v1/artifacts"
"""Path whose bodies are bytes. Not a form: pages may send one to other sites."""
_MAX_SHOWN = 80
"""Characters of a header that a message repeats."""


def check_content_type(path: str, headers: Headers) -> None:
    """Refuse a body whose Content-Type is not that of its path. Programs may omit the header.

    Raises:
        UnsupportedMediaType: it is another one.
    """
    expected = "application/octet-stream" if path == _BINARY_PATH else "application/json"
    given = headers.get("content-type")
    if given is None and "origin" not in headers:
        return
    if given is None or given.partition(";")[0].strip().lower() != expected:
        shown = "is missing" if given is None else f"{given[:_MAX_SHOWN]!r} is not supported"
        raise UnsupportedMediaType(
            f"Content-Type: {shown}: send the body as {expected} (curl: -H 'Content-Type: {expected}')"
        )
