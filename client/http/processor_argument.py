"""Conversion of the argument `processor=`, in all its forms, to a processor string."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from logitship.client.errors import ProcessorLoadError
from logitship.client.hugging_face import from_hugging_face, is_hugging_face
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.processor_string import InstalledProcessor, RegisteredProcessor, from_json, to_text
from logitship.client.serialization.syntax import signature_of


class ProcessorStrings:
    """Converter of processors to processor strings, for one request; serializes each class once.

    Strings are not kept for later requests: they contain the helpers and constants that the class uses, and in a
    notebook those change while the class stays the same object.

    Args:
        artifact_size: bytes of a tensor or array from which on the string only has its digest; None: it has all bytes.

    Attributes:
        artifacts: what the strings have only the digests of.
    """

    def __init__(self, artifact_size: int | None = None) -> None:
        self.artifacts: dict[Artifact, None] = {}
        self._artifact_size = artifact_size
        self._of_class: dict[type, str] = {}
        self._of_hugging_face: dict[int, tuple[Any, type]] = {}
        """Processors of Hugging Face by id, and the classes that run them."""

    def __call__(self, processor: Any, argument: str) -> str:
        """Return the processor string of `processor`.

        Args:
            processor: see `ProcessorLike`.
            argument: name of the argument, for error messages.

        Raises:
            TypeError: a processor cannot be given in this form.
            ValueError: it is a dict, but not a form of a processor string.
            ProcessorSerializationError: the class uses an object that cannot be serialized.
        """
        if isinstance(processor, str):
            return _from_text(processor, argument)
        if isinstance(processor, RegisteredProcessor | InstalledProcessor):
            return to_text(processor)
        if isinstance(processor, Mapping):
            return _from_form(dict(processor), argument)
        cls = processor if isinstance(processor, type) else type(processor)
        if not callable(getattr(cls, "to_str", None)) and is_hugging_face(processor):
            if id(processor) not in self._of_hugging_face:
                self._of_hugging_face[id(processor)] = processor, from_hugging_face(processor)
            return self._text_of(self._of_hugging_face[id(processor)][1])
        if not callable(getattr(cls, "to_str", None)):
            raise TypeError(
                f"{argument}: expected a CustomLogitProcessor class, a processor string, a form of one such as "
                f"{{'name': …}}, or an installed processor's name, not {_describe(processor)}{_advice(processor)}"
            )
        if cls is not processor and getattr(processor, "__dict__", None):
            raise TypeError(
                f"{argument}: expected the class {cls.__name__}, not an instance with the attributes "
                f"{sorted(vars(processor))}: the server creates its own instance without them; put a request's "
                "values in params"
            )
        return self._text_of(cls)

    def _text_of(self, cls: type) -> str:
        if cls not in self._of_class:
            self._of_class[cls] = self._serialize(cls)
        return self._of_class[cls]

    @property
    def largest(self) -> LargestClass | None:
        """The class with the longest string; None if there was no class."""
        sizes = [LargestClass(cls, len(text.encode())) for cls, text in self._of_class.items()]
        return max(sizes, key=lambda each: each.size, default=None)

    def _serialize(self, cls: Any) -> str:
        to_str: Any = cls.to_str
        # A class may have a `to_str` of its own, such as SGLang's.
        if self._artifact_size is None or getattr(to_str, "__func__", to_str) is not _our_to_str():
            return to_str()  # type: ignore[no-any-return]
        from logitship.client.serialization.serialize import serialize

        string = serialize(cls, artifact_size=self._artifact_size)
        self.artifacts |= dict.fromkeys(string.artifacts)
        return to_text(string)


@dataclass(frozen=True)
class LargestClass:
    """The class with the longest string of a request.

    Attributes:
        cls: the class.
        size: bytes of its string.
    """

    cls: type
    size: int

    def message(self, limit: float) -> str | None:
        """Return the message for a server that takes at most `limit` bytes; None if it takes the string."""
        if self.size <= limit:
            return None
        from logitship.client.serialization.contents import too_large_message

        return too_large_message(self.cls, self.size, int(limit))


def _our_to_str() -> Any:
    to_str: Any = CustomLogitProcessor.to_str
    return to_str.__func__


def is_list_of_processors(value: Any) -> bool:
    """Return whether a value is a list of several processors; a `LogitsProcessorList` of transformers is one."""
    return isinstance(value, list | tuple) and not is_hugging_face(value)


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


def _advice(value: Any) -> str:
    """Return how to make a processor of a class or function that is none; "" for other values."""
    if not callable(value):
        return ""
    call = value.__call__ if isinstance(value, type) or not inspect.isroutine(value) else value
    try:
        names = [name for name in signature_of(call).parameters if name != "self"]
    except (TypeError, ValueError):
        names = []
    if names[:2] == ["input_ids", "scores"]:
        return (
            ". It takes (input_ids, scores), as those of Hugging Face: derive its class from "
            "transformers.LogitsProcessor, whose objects and classes are taken as they are"
        )
    return (
        ". Derive a class from logitship.CustomLogitProcessor with __call__(self, logits, custom_param_list), or from "
        "logitship.RowProcessor with edit(self, row)"
    )


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
