"""A key for watermarks, and registries that mark with it."""

from __future__ import annotations

from logitship.builtin_processors import Registry, WatermarkKey
from logitship.builtin_processors import installed_processors as installed_without_key

WATERMARK_KEY = WatermarkKey(b"a secret of the tests")


def installed_processors() -> Registry:
    """Return a new registry of the built-in processors, whose watermarks have a key."""
    return installed_without_key(WATERMARK_KEY)
