"""Contract 2: a processor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, cast

from logitship.client.serialization.processor_base import ProcessorBase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from .check_report import CheckReport


class CustomLogitProcessor(ProcessorBase, ABC):
    """Edits the logits of the requests that brought it.

    Subclass it, write `__call__`, and send `to_str()` with a request:

    ```python
    class Ban(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                logits[row, params["token_id"]] = -float("inf")
            return logits
    ```

    One instance, made without arguments, serves all requests that carry the same string. What it keeps on `self` is
    shared by them and may vanish at any time; what belongs to one sequence goes to
    `custom_param_list[i]["__req__"].state`.

    Attributes:
        params_schema: optional JSON schema of the request's `custom_params`; travels with the class.
    """

    params_schema: ClassVar[dict[str, Any] | None] = None

    # The global that stands for this class in a pickle. Having SGLang's name, a string made here loads there.
    _pickles_as: ClassVar[tuple[str, str]] = ("sglang.srt.sampling.custom_logit_processor", "CustomLogitProcessor")

    @abstractmethod
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Edit the logits of this step, in place or not.

        Args:
            logits: float32 [rows, vocab]: one row for each request (or draft position) that carries this processor.
            custom_param_list: one dict a row: the request's `custom_params`, and `"__req__"`, its history and state.

        Returns:
            The logits, [rows, vocab], on the same device.
        """
        raise NotImplementedError

    @classmethod
    def to_str(cls) -> str:
        """This class as a processor string, for the field `custom_logit_processor` of a request.

        The class travels by value with everything that it uses of your own code; installed libraries travel by name.

        Raises:
            ProcessorSerializationError: something that it uses cannot travel; the message names it.
        """
        from logitship.client.serialization.processor_string import to_text
        from logitship.client.serialization.serialize import serialize

        return to_text(serialize(cls))

    @classmethod
    def from_str(cls, text: str) -> CustomLogitProcessor:
        """An instance of the class in a processor string, loaded into THIS process.

        Loading runs the code in the string, with all rights of this process. Only do it with strings you trust.

        Raises:
            ProcessorLoadError: the string is malformed or its class cannot be rebuilt here.
        """
        from logitship.client.serialization.loading import instantiate, load_class, names_in_use
        from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor, parse

        string = parse(text)
        if not isinstance(string, PickledProcessor | SourceProcessor):
            from .errors import ProcessorLoadError

            raise ProcessorLoadError("the string only names a processor of a server; it holds no code to load here")
        return cast(CustomLogitProcessor, instantiate(load_class(string, names_in_use())))

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
        """Try this class as a server would run it: does it travel, is a row what it is alone, how fast is it, …

        Needs the server's libraries. Takes some ten seconds. In a notebook, the value of the
        call shows as the report's page.

        Args:
            params: `custom_params` for the rows; several find more. None: the examples in `params_schema`.
            prompt: one or several, for real logits.
            max_tokens: tokens of a sequence.
            batch_sizes: rows of the calls that are timed.
            ignore: names of checks that do not count, see `CheckReport.checks`.
            settings: as flags of `logitship check`: `model_path`, `tokenizer_path`, `processor_isolation`,
                `sandbox_step_timeout`, ….

        Raises:
            ImportError: the server is not installed.
            ValueError: what was asked for cannot be checked; the message says why.
        """
        from importlib import import_module

        # By its name, because the client imports nothing of the server, which most of its users do not have. This one
        # method is a door for those who have it: an author has the class in hand, and nothing else to call.
        try:
            notebook = import_module("logitship.server.check.notebook")
        except ModuleNotFoundError as error:
            raise ImportError(f'check() needs the server: pip install "logitship[serve]" ({error})') from error
        report: CheckReport = notebook.check_class(
            cls,
            params,
            prompt=prompt,
            max_tokens=max_tokens,
            batch_sizes=batch_sizes,
            ignore=ignore,
            settings=settings,
        )
        return report
