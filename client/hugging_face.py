"""Processors of Hugging Face transformers as processors of requests.

Recognized by the names of their base classes: the client imports neither transformers nor torch. The wrapper's code is
serialized by value, so that its strings load on stock SGLang too. The object inside is serialized with its attributes,
its class as any other: by value if it is the author's, by name if it is installed.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, ClassVar

from .errors import ProcessorSerializationError
from .processor import CustomLogitProcessor
from .serialization.syntax import signature_of

MAX_STRING = 16 << 20
"""Maximum number of characters of the processor string of an object: beyond it, it holds a tokenizer or a model."""

_BASES = ("LogitsProcessor", "LogitsProcessorList", "LogitsWarper")
_MODULE = "transformers.generation.logits_process"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_hugging_face(processor: Any) -> bool:
    """Return whether a value is a `LogitsProcessor` of transformers, a list of them, or the class of one."""
    cls = processor if isinstance(processor, type) else type(processor)
    return any(base.__module__ == _MODULE and base.__name__ in _BASES for base in cls.__mro__)


def from_hugging_face(processor: Any) -> type[CustomLogitProcessor]:
    """Return a processor class that runs a processor of transformers on each row, as `model.generate` runs it on one.

    It is called with `input_ids`, int64 [1, tokens] with prompt and output, and `scores`, float32 [1, vocabulary]. Each
    sequence gets its own: a copy of the object, or a new instance of the class. `processor=` of the client takes
    objects and classes directly; use this for `to_str()`, `check()` and `register()`.

    Args:
        processor: a `LogitsProcessor` or a `LogitsProcessorList`, with its attributes; or a `LogitsProcessor` class,
            whose constructor gets its arguments from `params`. An argument named `tokenizer` that `params` lacks is
            the model's tokenizer.

    Raises:
        TypeError: it is neither.
    """
    if not is_hugging_face(processor):
        raise TypeError(f"expected a LogitsProcessor of transformers, or its class, not {type(processor).__name__}")
    cls = processor if isinstance(processor, type) else type(processor)
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__, "original": processor}
    body["_wraps"] = "original"  # for the source, see `source_capture.py`
    if isinstance(processor, type):
        names, required = _arguments(processor)
        body |= {"argument_names": names, "params_schema": {"type": "object", "required": required}}
    return types.new_class(cls.__name__, (HuggingFaceProcessor,), exec_body=lambda namespace: namespace.update(body))


def _arguments(cls: type) -> tuple[list[str], list[str]]:
    """Return the names of a constructor's arguments, and of those that a request must give."""
    parameters = {name: each for name, each in signature_of(cls).parameters.items() if each.kind in _NAMED}
    required = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    return list(parameters), [name for name in required if name != "tokenizer"]


class HuggingFaceProcessor(CustomLogitProcessor):
    """Base of the classes that `from_hugging_face` makes.

    Attributes:
        original: the processor of transformers, or its class.
        argument_names: names of the arguments of its constructor, if it is a class.
    """

    original: ClassVar[Any] = None
    argument_names: ClassVar[list[str]] = []

    @classmethod
    def to_str(cls) -> str:
        """Serialize the processor with its attributes, see `CustomLogitProcessor.to_str`."""
        text = super().to_str()
        if len(text) > MAX_STRING:
            raise ProcessorSerializationError(
                f"{cls.__name__} is serialized to {len(text)} characters, more than {MAX_STRING}: it holds "
                "something large, such as a model or a tokenizer. Send the class instead, with its arguments in "
                "params: an argument named tokenizer gets the server's"
            )
        return text

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """Run each row's processor on its prompt and output."""
        import torch

        all_params: Any = custom_param_list or ()
        for row, params in enumerate(all_params):
            request = params["__req__"]
            processor = self.processor_of(params)
            tokens = [*request.origin_input_ids, *request.output_ids]
            input_ids = torch.tensor([tokens], dtype=torch.int64, device=logits.device)
            scores = logits[row : row + 1]
            result = processor(input_ids, scores)
            if result is None:
                return None  # a fault of the author's class, which the executor explains as that of any other
            if result is not scores:
                logits[row] = result[0]
        return logits

    def processor_of(self, params: Any) -> Any:
        """Return the processor of a row's sequence, made in its first step."""
        state = getattr(params["__req__"], "state", None)
        if state is None:  # stock SGLang, where the parameters live as long as the request
            state = params
        if "__processor__" not in state:
            state["__processor__"] = self.make(params)
        return state["__processor__"]

    def make(self, params: Any) -> Any:
        """Return a processor for a new sequence."""
        import copy

        if not isinstance(self.original, type):
            shared = {id(part): part for part in self.shared_parts(self.original)}
            return copy.deepcopy(self.original, shared)
        arguments = {name: params[name] for name in self.argument_names if name in params}
        if "tokenizer" in self.argument_names:
            arguments.setdefault("tokenizer", params["__req__"].tokenizer)
        return self.original(**arguments)

    def shared_parts(self, processor: Any) -> list[Any]:
        """Return the tokenizers in a processor's attributes, which are large and never change."""
        processors = processor if isinstance(processor, list) else [processor]
        parts = [part for each in processors for part in vars(each).values()]
        return [part for part in parts if hasattr(part, "encode") and hasattr(part, "get_vocab")]
