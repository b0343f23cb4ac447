"""Options of a check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKS = ("serializable", "contract", "finite", "deterministic", "state", "rows", "argmax", "speed")
"""Names of the checks, in the order of the report."""
OLD_NAMES = {"travels": "serializable"}  # codespell:ignore travels
"""Earlier names of checks, which `ignore` still accepts."""

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "1, 2, 3, 4,",
)
MAX_TOKENS_LIMIT = 256
BATCH_SIZE_LIMIT = 256


class UsageError(ValueError):
    """The class or the options cannot be checked; the message says why, and how to fix it."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of a check. See `logitship check --help`.

    Attributes:
        params: `custom_params`, assigned to the rows in turn. Empty: the examples of the class's `params_schema`.
        prompts: of the sequences.
        max_tokens: most tokens of a sequence.
        batch_sizes: rows of the timed calls.
        ignore: names of checks whose findings do not count.
    """

    params: Sequence[Mapping[str, Any]] = ()
    prompts: Sequence[str] = DEFAULT_PROMPTS
    max_tokens: int = 8
    batch_sizes: Sequence[int] = (1, 8, 64)
    ignore: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", frozenset(OLD_NAMES.get(name, name) for name in self.ignore))
        if unknown := sorted(self.ignore - set(CHECKS)):
            raise UsageError(f"ignore: no check is named {unknown[0]!r}; the checks are: {', '.join(CHECKS)}")
        if not 2 <= self.max_tokens <= MAX_TOKENS_LIMIT:
            raise UsageError(f"max_tokens must be from 2 to {MAX_TOKENS_LIMIT}, not {self.max_tokens}")
        if not self.batch_sizes or not all(1 <= rows <= BATCH_SIZE_LIMIT for rows in self.batch_sizes):
            raise UsageError(f"batch_sizes must be from 1 to {BATCH_SIZE_LIMIT}, not {list(self.batch_sizes)}")
        if not self.prompts or not all(self.prompts):
            raise UsageError("prompt: must not be empty")
        for params in self.params:
            if not isinstance(params, Mapping):
                raise UsageError(f"params: must be an object, not {type(params).__name__}")
            try:
                json.dumps(params)
            except (TypeError, ValueError) as error:
                raise UsageError(f"params: must be JSON, as in a request: {error}") from None


def read_params(text: str) -> dict[str, Any]:
    """Parse a JSON object, or read it from a file if the text is `@` and a file name.

    Raises:
        UsageError: the text is neither.
    """
    try:
        value = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"params: cannot read {text[1:]!r}: {error}") from None
    except ValueError as error:
        raise UsageError(
            f"""params: {text[:80]!r} is not JSON ({error}); an example: '{{"token_ids": [30]}}'"""
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"params: must be a JSON object, not {type(value).__name__}")
    return value
