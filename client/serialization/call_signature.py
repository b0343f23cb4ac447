"""The signature of a processor's `__call__`, and what is wrong with those of other libraries."""

from __future__ import annotations

import inspect

from .syntax import signature_of

_EXPECTED = (
    "a CustomLogitProcessor is called once per step for all of its rows, as __call__(self, logits, custom_param_list). "
    "The tokens of a row are in custom_param_list[row]['__req__']: origin_input_ids and output_ids"
)
_OR_HUGGING_FACE = "Or derive it from transformers.LogitsProcessor instead: processor= takes those as they are"


def signature_mistake(cls: type) -> str:
    """Return what is wrong with the signature of a processor's `__call__`; "" if it can be called."""
    try:
        signature = signature_of(cls.__call__)
        has_self = not isinstance(inspect.getattr_static(cls, "__call__"), staticmethod | classmethod)
    # A class can define `__call__` as anything, and its metaclass too.
    except Exception:  # noqa: BLE001  # boundary: author code
        return ""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in signature.parameters.items() if each.kind in positional][has_self:]
    required = [
        name
        for name, each in signature.parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY and each.default is inspect.Parameter.empty
    ]
    shown = f"({', '.join([*names, *(['*', *required] if required else [])])})"
    if names[:2] == ["input_ids", "scores"]:
        return f"its __call__ takes {shown}, as Hugging Face's: {_EXPECTED}. {_OR_HUGGING_FACE}"
    if "logits" in names[1:] and names[0] != "logits":
        return f"its __call__ takes {shown}, as vLLM's, with the logits last: {_EXPECTED}"
    try:
        signature.bind(*[None] * (2 + has_self))
    except TypeError:
        return f"its __call__ takes {shown}: {_EXPECTED}"
    return ""
