"""`logitship.StructuredOutputsParams`: vLLM's constructor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.refusals import BadRequest
from logitship.server.schemas.request_schema import parse_model
from logitship.server.schemas.structured_outputs import Constraint, StructuredOutputs

_AT = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What an output is constrained to: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and
    `structural_tag`, and what JSON may look like.

    Raises:
        InvalidSamplingParams: a ValueError; there is none or more than one, or one is of another type.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, or its JSON text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """Texts, one of which is the output."""
    grammar: str | None = None
    """A context-free grammar: EBNF with a rule `root ::= …`, or Lark with a rule `start: …`."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """No white space between the parts of JSON."""
    disable_additional_properties: bool = False
    """Not supported: write `"additionalProperties": false` into the schema."""
    whitespace_pattern: str | None = None
    """A regular expression for what may stand between the parts of JSON."""
    structural_tag: str | None = None
    """A structural tag, as JSON text."""

    def __post_init__(self) -> None:
        if self.choice is not None and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", list(self.choice))
        # Now, where the caller's own line is in the traceback.
        _ = self.constraint

    @property
    def constraint(self) -> Constraint:
        """What the installed processor `grammar` makes of it."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            read = parse_model(StructuredOutputs, values, _AT)
        except BadRequest as refused:
            at = refused.param or _AT
            raise InvalidSamplingParams(at, refused.message.removeprefix(f"{at}: ")) from None
        return next(read.constraints(_AT))
