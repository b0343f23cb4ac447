"""Executor that runs shipped processors in this process, without isolation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from logitship.client.author_errors import error_message, error_text
from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.loading import instantiate_prepared, load_class
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.author_code.calls import call, edit

from .class_description import describe
from .executor import LoadedProcessor
from .local_executor import LocalExecutor
from .request_view import ModelView


class InProcessExecutor(LocalExecutor):
    """Loads and calls processors in this process. Only for code that the operator trusts.

    Args:
        names: objects that shipped classes may refer to by name, by `(module, qualified name)`: SGLang's built-ins.
        model: the model that classes prepare for.
    """

    def __init__(self, names: Mapping[tuple[str, str], Any], model: ModelView) -> None:
        self._names = names
        self._model = model

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """Load a class and instantiate it in this process, see `ProcessorExecutor.load`."""
        if not isinstance(string, PickledProcessor | SourceProcessor):
            raise ProcessorLoadError(f"{type(string).__name__} ships no code")
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        try:
            cls = call(load_class, runnable, self._names)
            instance = call(instantiate_prepared, cls, self._model.tokenizer, self._model.vocab_size)
            described = call(describe, cls)
        except ProcessorLoadError as error:
            raise ProcessorLoadError(error_message(error)) from None
        # `load_class` lets KeyboardInterrupt and the like pass. Raised by an author's code, it must not end the server.
        except BaseException as error:  # noqa: BLE001  # boundary: author code
            raise ProcessorLoadError(f"the processor could not be loaded: {error_text(error)}") from None
        return LoadedProcessor(
            runnable.digest,
            described.name,
            self,
            instance,
            tenant=tenant,
            description=described.description,
            params_schema=described.params_schema,
        )

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """Call the instance of the class on the rows, see `LocalExecutor.run`."""
        instance = processor.instance
        edit(
            instance,
            logits,
            list(param_list),
            name=processor.name,
            digest=processor.digest,
            shipped_class=type(instance),
        )
        return logits
