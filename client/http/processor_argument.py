"""From the many things that may be given as `processor=` to the processor string on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import InstalledProcessor, RegisteredProcessor, from_json, to_text


class ProcessorStrings:
    """Turns processors into processor strings, each class once for the life of this object: one request.

    Not longer: the string carries the helpers and constants that the class uses, and in a notebook those change while
    the class stays the same object.
    """

    def __init__(self) -> None:
        self._of_class: dict[type, str] = {}

    def __call__(self, processor: Any, argument: str) -> str:
        """The processor string of `processor`.

        Args:
            processor: see `ProcessorLike`.
            argument: its name in error messages.

        Raises:
            TypeError: it is none of the things that a processor can be given as.
            ValueError: it is a dict that is not one of the forms of a processor string.
            ProcessorSerializationError: the class uses an object that cannot travel.
        """
        if isinstance(processor, str):
            return _from_text(processor, argument)
        if isinstance(processor, RegisteredProcessor | InstalledProcessor):
            return to_text(processor)
        if isinstance(processor, Mapping):
            return _from_form(dict(processor), argument)
        cls = processor if isinstance(processor, type) else type(processor)
        if not callable(getattr(cls, "to_str", None)):
            raise TypeError(
                f"{argument}: expected a CustomLogitProcessor class, a processor string, a form of one such as "
                f"{{'name': …}}, or an installed processor's name, not {_describe(processor)}"
            )
        if cls is not processor and getattr(processor, "__dict__", None):
            raise TypeError(
                f"{argument}: expected the class {cls.__name__}, not an instance that holds {sorted(vars(processor))}: "
                "the server makes its own instance and would not see these; put a request's values in params"
            )
        if cls not in self._of_class:
            self._of_class[cls] = cls.to_str()  # type: ignore[attr-defined]
        return self._of_class[cls]


def _from_text(text: str, argument: str) -> str:
    if text.lstrip().startswith("{"):
        return text
    if not text:
        raise ValueError(f"{argument}: the text is empty")
    return to_text(RegisteredProcessor(text) if text.startswith("sha256:") else InstalledProcessor(text))


def _from_form(form: dict[str, Any], argument: str) -> str:
    try:
        from_json(form)
    except ProcessorLoadError as error:
        raise ValueError(f"{argument}: {error}") from None
    return orjson.dumps(form).decode()


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
