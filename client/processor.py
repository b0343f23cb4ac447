"""Base class of processors that are sent with requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, cast

from logitship.client.serialization.processor_base import ProcessorBase

from .params_schema import as_json_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from .check_report import CheckReport


class CustomLogitProcessor(ProcessorBase, ABC):
    """Processor that edits the logits of the requests it is attached to.

    Subclass it, implement `__call__`, and send `to_str()` with a request:

    ```python
    class Ban(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                logits[row, params["token_id"]] = -float("inf")
            return logits
    ```

    One instance, created without arguments, serves all requests with the same string. Attributes of `self` are shared
    by these requests and may be lost at any time; keep the state of one sequence in
    `custom_param_list[i]["__req__"].state`.

    A class may define `prepare(self, tokenizer, vocab_size)`, to build tables over the vocabulary: it is called once,
    when the class is loaded for a model.

    Attributes:
        params_schema: optional JSON Schema of the request's `custom_params`, or a pydantic model, which becomes its
            JSON Schema. Servers refuse requests that do not match it.
    """

    params_schema: ClassVar[Any] = None

    # Module and name of this class in a pickle. They are SGLang's, so that SGLang can load the string.
    _pickles_as: ClassVar[tuple[str, str]] = ("sglang.srt.sampling.custom_logit_processor", "CustomLogitProcessor")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Replace a pydantic model in `params_schema` by its JSON Schema."""
        super().__init_subclass__(**kwargs)
        if "params_schema" in cls.__dict__:
            cls.params_schema = as_json_schema(cls.__dict__["params_schema"])

    @abstractmethod
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Edit the logits of this step, in place or not.

        Args:
            logits: float32 [rows, vocab]: one row per request (or draft position) with this processor.
            custom_param_list: one dict per row: the request's `custom_params`, and `"__req__"`, its history and state.

        Returns:
            The logits, [rows, vocab], on the same device.
        """
        raise NotImplementedError

    @classmethod
    def to_str(cls) -> str:
        """Serialize this class to a processor string, for the field `custom_logit_processor` of a request.

        The class and everything it uses of your own code is serialized by value; installed libraries by name.

        Raises:
            ProcessorSerializationError: it uses something that cannot be serialized; the message names it.
        """
        from logitship.client.serialization.processor_string import to_text
        from logitship.client.serialization.serialize import serialize

        return to_text(serialize(cls))

    @classmethod
    def from_str(cls, text: str) -> CustomLogitProcessor:
        """Load a processor string into THIS process and return an instance of its class.

        Loading runs the code in the string, with the privileges of this process. Only load strings that you trust.

        Raises:
            ProcessorLoadError: the string is malformed or its class cannot be rebuilt here.
        """
        from logitship.client.serialization.loading import instantiate, load_class, names_in_use
        from logitship.client.serialization.preparation import let_prepare_first
        from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor, parse

        string = parse(text)
        if not isinstance(string, PickledProcessor | SourceProcessor):
            from .errors import ProcessorLoadError

            raise ProcessorLoadError("the string only names a processor on a server; it contains no code to load")
        loaded = load_class(string, names_in_use())
        let_prepare_first(loaded)  # in its first call, which knows the model
        return cast(CustomLogitProcessor, instantiate(loaded))

    @classmethod
    def check(
        cls,
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: str | Sequence[str] | None = None,
        max_tokens: int = 8,
        batch_sizes: Sequence[int] = (1, 8, 64),
        ignore: Sequence[str] = (),
        **settings: Any,
    ) -> CheckReport:
        """Check this class as a server would run it: serialization, batch invariance, speed, and more.

        Needs the server's libraries. Takes about ten seconds. A notebook shows the returned report as a page.

        Args:
            params: `custom_params` for the rows; several cover more cases. None: the examples in `params_schema`.
            prompt: one or several prompts, for real logits.
            max_tokens: tokens per sequence.
            batch_sizes: numbers of rows of the timed calls.
            ignore: names of checks whose failures are ignored, see `CheckReport.checks`.
            settings: the flags of `logitship check`: `model_path`, `tokenizer_path`, `processor_isolation`,
                `sandbox_step_timeout`, ….

        Raises:
            ImportError: the server is not installed.
            ValueError: an argument is invalid; the message says why.
        """
        from importlib import import_module

        # By name, because the client must not import the server, which most of its users do not install.
        try:
            run = import_module("logitship.server.check.run")
        except ModuleNotFoundError as error:
            raise ImportError(f'check() needs the server: pip install "logitship[serve]" ({error})') from error
        report: CheckReport = run.check_class(
            cls,
            params,
            prompt=prompt,
            max_tokens=max_tokens,
            batch_sizes=batch_sizes,
            ignore=ignore,
            settings=settings,
        )
        return report
