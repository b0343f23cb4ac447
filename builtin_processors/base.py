"""What an installed processor has beyond a shipped one: a name, a schema, and a check of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.processors.executor import PREPARED_KEY

from .params import ModelFacts, ProcessorParams


class BuiltinProcessor(CustomLogitProcessor):
    """A row-level processor that a request can ask for by name, without shipping code.

    What a row needs beside its history is made once, at admission (`prepare`), and shared by the request's sequences.
    What changes with the history belongs in `__req__.state`, follows the new tokens only, and also follows when tokens
    are taken back: see `StateHistory`.
    """

    name: ClassVar[str]
    """What a request writes: `{"name": "<name>"}`."""
    Params: ClassVar[type[ProcessorParams]]
    """The request's `custom_params`."""
    example: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Parameters with which the tests run the processor on several small models: token ids below 14, and texts of
    the characters `a`, `b`, `1` and `2`."""
    params_schema: ClassVar[dict[str, Any] | None]
    """JSON Schema (draft 2020-12) of `Params`."""
    is_mask: ClassVar[bool] = False
    """True if all it does is to set logits to -inf, on the grounds of the history alone: a grammar, a tree. Masks run
    before a request's other processors, and after them once more, so that whatever these force or raise, only what the
    masks allow is drawn."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the schema."""
        super().__init_subclass__(**kwargs)
        if "Params" in vars(cls):
            cls.params_schema = cls.Params.as_json_schema()

    @classmethod
    def check_model(cls, model: ModelFacts) -> None:  # most work with any
        """Refuse a model that the processor cannot work with.

        Raises:
            ValueError: says why.
        """

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> Any:
        """Check a request's `custom_params`, and make what its rows need. May take long; never on the step path.

        Returns:
            `Params`, or what a subclass makes of it. Nobody changes it any more: the request's sequences share it.

        Raises:
            ValueError: names the parameter and says what was expected; the request is refused with this message.
            PreparationUnavailable: the server cannot do it now.
        """
        self.check_model(model)
        return self.Params.read(params, model)

    def prepared(self, params: dict[str, Any]) -> Any:
        """What `prepare` made for a row.

        Args:
            params: of the row, `__req__` included.
        """
        if PREPARED_KEY not in params:  # it was called by something else than a server
            params[PREPARED_KEY] = self.prepare(params, params["__req__"])
        return params[PREPARED_KEY]
