from __future__ import annotations

import pytest

from logitship.server.vllm_names.exceptions import VLLMValidationError


def test_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"^too long$"):
        raise VLLMValidationError("too long")


def test_message_has_parameter_and_value() -> None:
    error = VLLMValidationError("too long", parameter="budget", value=7)
    assert (error.parameter, error.value) == ("budget", 7)
    assert str(error) == "too long (parameter=budget, value=7)"
    assert str(VLLMValidationError("too long", value=0)) == "too long (value=0)"
