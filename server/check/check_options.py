"""What a check is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKS = ("travels", "contract", "finite", "deterministic", "state", "rows", "argmax", "speed")
"""In the order in which they stand in the report."""

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "1, 2, 3, 4,",
)
MOST_TOKENS = 256
LARGEST_BATCH = 256


class UsageError(ValueError):
    """What was asked for cannot be checked; the message says why, and how to ask for it."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """See `logitship check --help`.

    Attributes:
        params: `custom_params` that the rows get in turn. None: the examples of the class's `params_schema`, if any.
        prompts: for the real logits.
        max_tokens: steps that a sequence plays.
        batch_sizes: rows of the calls that are timed.
        ignore: names of checks whose findings do not count.
    """

    params: Sequence[Mapping[str, Any]] = ()
    prompts: Sequence[str] = DEFAULT_PROMPTS
    max_tokens: int = 8
    batch_sizes: Sequence[int] = (1, 8, 64)
    ignore: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if unknown := sorted(self.ignore - set(CHECKS)):
            raise UsageError(f"ignore: no check is named {unknown[0]!r}; there are: {', '.join(CHECKS)}")
        if not 2 <= self.max_tokens <= MOST_TOKENS:
            raise UsageError(f"max_tokens must be from 2 to {MOST_TOKENS}, not {self.max_tokens}")
        if not self.batch_sizes or not all(1 <= rows <= LARGEST_BATCH for rows in self.batch_sizes):
            raise UsageError(f"batch_sizes must be from 1 to {LARGEST_BATCH}, not {list(self.batch_sizes)}")
        if not self.prompts or not all(self.prompts):
            raise UsageError("prompt: must not be empty")
        for params in self.params:
            if not isinstance(params, Mapping):
                raise UsageError(f"params: must be an object, not {type(params).__name__}")
            try:
                json.dumps(params)
            except (TypeError, ValueError) as error:
                raise UsageError(f"params: requests carry them as JSON, which these are not: {error}") from None


def read_params(text: str) -> dict[str, Any]:
    """An object as JSON text, or `@` and the name of a file that holds one.

    Raises:
        UsageError: it is neither.
    """
    try:
        value = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"params: cannot read {text[1:]!r}: {error}") from None
    except ValueError as error:
        raise UsageError(f"""params: {text[:80]!r} is not JSON ({error}), such as '{{"token_ids": [30]}}'""") from None
    if not isinstance(value, dict):
        raise UsageError(f"params: must be a JSON object, not {type(value).__name__}")
    return value
