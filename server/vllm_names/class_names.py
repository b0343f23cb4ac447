"""Classes of batch processors by the names that vLLM's `--logits-processors` takes."""

from __future__ import annotations

from collections.abc import Sequence

from logitship.sampler.batch_processors.interface import LogitsProcessor
from logitship.sampler.batch_processors.plugins import resolve


def load_classes(logits_processors: Sequence[str | type[LogitsProcessor]] | None) -> list[type[LogitsProcessor]]:
    """Load batch processors as vLLM's `_load_logitsprocs_by_fqcns` does, with its messages.

    Args:
        logits_processors: classes, or their names as `module:Class`.

    Raises:
        ValueError: a name does not have this form, or does not name a subclass of `LogitsProcessor`.
        RuntimeError: a class cannot be imported.
    """
    return [_load(each, index) for index, each in enumerate(logits_processors or ())]


def _load(spec: str | type[LogitsProcessor], index: int) -> type[LogitsProcessor]:
    cls = spec if isinstance(spec, type) else _import(spec, index)
    if not isinstance(cls, type):
        raise ValueError("Loaded logit processor must be a type.")
    if not issubclass(cls, LogitsProcessor):
        raise ValueError(f"{cls.__name__} is not a subclass of LogitsProcessor")
    return cls


def _import(name: str, index: int) -> object:
    if name.count(":") != 1:
        raise ValueError(f"Invalid logits processor FQCN {name!r}. Expected format: '<module>:<type>'")
    try:
        return resolve(name)
    except ImportError as error:
        raise RuntimeError(f"Failed to load {index}th LogitsProcessor plugin {name}: {error}") from error
