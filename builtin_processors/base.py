"""Base class of installed processors: a `CustomLogitProcessor` with a name, a schema, and validated parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.processors.executor import PREPARED_KEY

from .params import ModelFacts, ProcessorParams


class BuiltinProcessor(CustomLogitProcessor):
    """A processor that a request can ask for by name, without shipping code.

    Data derived from the parameters is computed once, at admission (`prepare`), and shared by the request's sequences.
    Data that depends on the history belongs in `__req__.state`, is updated with the new tokens only, and must support
    removing tokens: see `StateHistory`.

    A call looks at all rows before it edits the first one. If it raises, it is made again for each row by itself: one
    request cannot end those of others.
    """

    name: ClassVar[str]
    """The name used in a request: `{"name": "<name>"}`."""
    Params: ClassVar[type[ProcessorParams]]
    """Model of the request's `custom_params`."""
    example: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Parameters with which the tests run the processor on several small models: token ids below 14, and texts of
    the characters `a`, `b`, `1` and `2`."""
    params_schema: ClassVar[dict[str, Any] | None]
    """JSON Schema (draft 2020-12) of `Params`."""
    is_mask: ClassVar[bool] = False
    """True if it only sets logits to -inf, depending on the history alone: a grammar, a tree. Masks run before a
    request's other processors and again after them, so that only tokens that the masks allow are sampled, whatever the
    others force or raise."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Generate the schema."""
        super().__init_subclass__(**kwargs)
        if "Params" in vars(cls):
            cls.params_schema = cls.Params.as_json_schema()

    @classmethod
    def check_model(cls, model: ModelFacts) -> None:  # most processors support all models
        """Refuse a model that the processor does not support.

        Raises:
            ValueError: the model is not supported; says why.
        """

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> Any:
        """Validate a request's `custom_params`, and precompute data for its rows. May be slow; not on the step path.

        Returns:
            `Params`, or an object of the subclass. Immutable, because the request's sequences share it.

        Raises:
            ValueError: a parameter is invalid; the request is refused with this message.
            PreparationUnavailable: the server cannot do it at the moment.
        """
        self.check_model(model)
        return self.Params.read(params, model)

    def params_in_beams(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request's parameters in a beam search, where some have other defaults."""
        return params

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """Forbid the tokens that the next call will set to -inf, in each row where these follow from the history alone.

        A subclass that is no mask may restrict a row too, if it keeps the logits of all other tokens finite and reads
        no logit. Every other row is left open.

        Args:
            param_list: the rows' parameters, as for a call.
            allowed: the tokens of each row, to be restricted.
        """
        for each in allowed:
            each.leave_open()

    def prepared(self, params: dict[str, Any]) -> Any:
        """Return the result of `prepare` for a row.

        Args:
            params: the row's parameters, `__req__` included.
        """
        if PREPARED_KEY not in params:  # called outside a server
            params[PREPARED_KEY] = self.prepare(params, params["__req__"])
        return params[PREPARED_KEY]
