"""Conversion of the processors in `SamplingParams` to the engine's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitship.client.http.processor_argument import ProcessorStrings, is_list_of_processors
from logitship.client.serialization.processor_string import InstalledProcessor, RegisteredProcessor
from logitship.server.processors.request_processors import read_entry, read_processor
from logitship.server.refusals import RequestTooLarge
from logitship.server.requests.messages import AttachedProcessor, CallableRequest

from .sampling_params import SamplingParams
from .structured_outputs_params import StructuredOutputsParams


@dataclass(frozen=True)
class PromptProcessors:
    """The processors of one prompt.

    Attributes:
        processors: in the order in which they run, not loaded yet.
        names: the caller's names for the fields that the engine's refusals name.
    """

    processors: tuple[AttachedProcessor, ...]
    names: Mapping[str, str]


def read_prompt_processors(
    params: SamplingParams, to_string: ProcessorStrings, max_processor_size: int
) -> PromptProcessors:
    """Read the processors of `params`, and serialize classes to processor strings. Nothing is loaded.

    Args:
        params: has the processors.
        to_string: serializes classes, each once for all prompts of a call.
        max_processor_size: longest processor string, in bytes.

    Raises:
        RequestRefused: a processor is malformed or too large; names the field.
        TypeError: a processor has an unsupported type.
        ValueError: a processor is a dict in none of the supported formats.
        ProcessorSerializationError: a class uses an object that is not serializable.
    """
    reader = _ProcessorReader(to_string, params.custom_params, max_processor_size)
    one = params.custom_logit_processor
    if one is None:
        at = "logits_processors"
        fields = [f"{at}[{i}]" for i in range(len(params.logits_processors))]
        processors = [reader.entry(*each) for each in zip(params.logits_processors, fields, strict=True)]
    else:
        at = "custom_logit_processor"
        given = one if is_list_of_processors(one) else [one]
        fields = [at] if given is not one else [f"{at}[{i}]" for i in range(len(given))]
        processors = [reader.processor(*each) for each in zip(given, fields, strict=True)]
    own = [one is None and _has_own_params(params.logits_processors[i]) for i in range(len(fields))]
    params_fields = [f"{field}.params" if has else "custom_params" for field, has in zip(fields, own, strict=True)]
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        constraint = params.structured_outputs.constraint
        processors.insert(0, constraint.processor)
        fields, params_fields = [constraint.at, *fields], [constraint.at, *params_fields]
    names = {"processors": at}
    for i, (field, params_field) in enumerate(zip(fields, params_fields, strict=True)):
        names |= {f"processors[{i}]": field, f"processors[{i}].params": params_field}
    return PromptProcessors(tuple(processors), names)


def _has_own_params(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get("params") is not None


class _ProcessorReader:
    """Reads the processors of one `SamplingParams`. `custom_params` apply to those without their own parameters."""

    def __init__(
        self, to_string: ProcessorStrings, custom_params: Mapping[str, Any] | None, max_processor_size: int
    ) -> None:
        self._to_string = to_string
        self._custom_params = custom_params
        self._max_processor_size = max_processor_size

    def processor(self, given: Any, at: str) -> AttachedProcessor:
        """Read a processor with SGLang's contract, in any form."""
        string = self._string(given, at)
        return read_processor(string, self._custom_params, at, max_processor_size=self._max_processor_size)

    def entry(self, entry: Any, at: str) -> AttachedProcessor:
        """Read an entry of `logits_processors`."""
        if isinstance(entry, Mapping):
            return self._mapping(entry, at)
        if isinstance(entry, str):
            return self._read(entry, at)
        if isinstance(entry, InstalledProcessor | RegisteredProcessor) or callable(getattr(entry, "to_str", None)):
            return self.processor(entry, at)
        if callable(entry):
            return CallableRequest(entry)
        raise TypeError(
            f"{at}: expected a dict with 'processor' and 'params', one with 'qualname', 'args' and 'kwargs', a "
            f"qualified name, a CustomLogitProcessor class, or a callable, not {type(entry).__name__}"
        )

    def _mapping(self, entry: Mapping[str, Any], at: str) -> AttachedProcessor:
        entry = dict(entry)
        if entry.get("processor") is not None:
            entry["processor"] = self._string(entry["processor"], f"{at}.processor")
        if isinstance(entry.get("args"), tuple):
            entry["args"] = list(entry["args"])
        return self._read(entry, at)

    def _string(self, given: Any, at: str) -> str:
        string = self._to_string(given, at)
        largest = self._to_string.largest
        if largest is not None and (message := largest.message(self._max_processor_size)):
            raise RequestTooLarge(f"{at}: {message}", param=at)
        return string

    def _read(self, entry: Any, at: str) -> AttachedProcessor:
        return read_entry(entry, at, max_processor_size=self._max_processor_size, params=self._custom_params)
