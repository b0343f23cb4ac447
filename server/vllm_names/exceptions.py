"""`vllm.exceptions`."""

from __future__ import annotations

from typing import Any


class VLLMValidationError(ValueError):
    """The parameters of a request are invalid. `validate_params` may raise this or any other `ValueError`.

    Attributes:
        parameter: name of the invalid parameter; None if it is unknown.
        value: its value.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __str__(self) -> str:
        pairs = (("parameter", self.parameter), ("value", self.value))
        details = ", ".join(f"{name}={value}" for name, value in pairs if value is not None)
        return f"{super().__str__()} ({details})" if details else super().__str__()
