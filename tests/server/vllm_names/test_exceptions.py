from __future__ import annotations

import pytest

from logitship.server.vllm_names.exceptions import VLLMValidationError


def test_it_is_refused_like_any_other_value_error() -> None:
    with pytest.raises(ValueError, match=r"^too long$"):
        raise VLLMValidationError("too long")


def test_what_was_refused() -> None:
    error = VLLMValidationError("too long", parameter="budget", value=7)
    assert (error.parameter, error.value) == ("budget", 7)
    assert str(error) == "too long (parameter=budget, value=7)"
    assert str(VLLMValidationError("too long", value=0)) == "too long (value=0)"
