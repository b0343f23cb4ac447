"""Answers of the server over HTTP."""

from __future__ import annotations

from typing import Any


def error_of(answer: Any, status: int = 400) -> Any:
    """Return the error of an answer that must have this status."""
    assert answer.status_code == status, answer.text
    return answer.json()["error"]
