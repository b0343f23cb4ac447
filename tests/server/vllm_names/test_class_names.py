from __future__ import annotations

import pytest

from logitship.builtin_processors.parameter_processors import MinPLogitsProcessor
from logitship.server.vllm_names.class_names import load_classes

MIN_P = "logitship.builtin_processors.parameter_processors:MinPLogitsProcessor"


def test_classes_and_names() -> None:
    assert load_classes([MIN_P, MinPLogitsProcessor]) == [MinPLogitsProcessor] * 2
    assert load_classes(None) == []


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("logitship.builtin_processors.min_p", ValueError, "Invalid logits processor FQCN 'logitship.builtin_process"),
        ("a:b:c", ValueError, "Invalid logits processor FQCN 'a:b:c'. Expected format: '<module>:<type>'"),
        ("no.such.module:Class", RuntimeError, "Failed to load 0th LogitsProcessor plugin no.such.module:Class"),
        (
            "logitship.builtin_processors.parameter_processors:torch",
            ValueError,
            "Loaded logit processor must be a type",
        ),
        (dict, ValueError, "dict is not a subclass of LogitsProcessor"),
        ("builtins:dict", ValueError, "dict is not a subclass of LogitsProcessor"),
    ],
)
def test_refused_classes(spec: str | type, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        load_classes([spec])
