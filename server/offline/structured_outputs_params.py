"""`logitship.StructuredOutputsParams`: a constraint, with the constructor of vLLM's class of the same name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.refusals import BadRequest
from logitship.server.schemas.request_schema import parse_model
from logitship.server.schemas.structured_outputs import Constraint, StructuredOutputs

_AT = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint on an output: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`.

    Stand-in for `vllm.sampling_params.StructuredOutputsParams`. The other fields control the whitespace in JSON.

    Raises:
        InvalidSamplingParams: a ValueError; no constraint or more than one is given, or one has the wrong type.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as a dict or as JSON text."""
    regex: str | None = None
    """A regular expression that the whole output must match."""
    choice: Sequence[str] | None = None
    """Texts, one of which must be the output."""
    grammar: str | None = None
    """A context-free grammar: EBNF with a rule `root ::= …`, or Lark with a rule `start: …`."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """Allow no whitespace between the elements of JSON."""
    disable_additional_properties: bool = False
    """Not supported: put `"additionalProperties": false` into the schema."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the elements of JSON."""
    structural_tag: str | None = None
    """A structural tag, as JSON text."""

    def __post_init__(self) -> None:
        # A mapping would be reduced to its keys.
        if isinstance(self.choice, Iterable) and not isinstance(self.choice, str | Mapping):
            object.__setattr__(self, "choice", list(self.choice))
        # Validate now, while the caller's line is in the traceback.
        _ = self.constraint

    @property
    def constraint(self) -> Constraint:
        """The constraint, for the installed processor `grammar`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            read = parse_model(StructuredOutputs, values, _AT)
        except BadRequest as refused:
            at = refused.param or _AT
            raise InvalidSamplingParams(at, refused.message.removeprefix(f"{at}: ")) from None
        return next(read.constraints(_AT))
