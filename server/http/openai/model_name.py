"""The name of the model in requests."""

from __future__ import annotations

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import NotFound

ANY_MODEL = "default"
"""SGLang's alias for the served model, whatever its name."""


def check_model_name(engine: AsyncEngine, name: str | None) -> None:
    """Check the name of the requested model. None: the served one.

    Raises:
        NotFound: the server does not serve this model.
    """
    if name not in (None, engine.model.name, engine.model.path, ANY_MODEL):
        raise NotFound(f"model: {name[:200]!r} does not exist; this server serves {engine.model.name!r}", param="model")
