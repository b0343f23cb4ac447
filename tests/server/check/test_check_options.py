"""What a check may be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logitship.server.check.check_options import CheckOptions, UsageError, read_params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": frozenset({"speeed"})}, "no check is named 'speeed'; there are: travels, contract"),
        ({"max_tokens": 1}, "max_tokens must be from 2 to 256, not 1"),
        ({"batch_sizes": [1, 0]}, r"batch_sizes must be from 1 to 256, not \[1, 0\]"),
        ({"batch_sizes": []}, "batch_sizes must be"),
        ({"prompts": [""]}, "prompt: must not be empty"),
        ({"params": [["token_ids"]]}, "params: must be an object, not list"),
        ({"params": [{"token_ids": {3, 4}}]}, "requests carry them as JSON, .* set is not JSON serializable"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckOptions(**options)


def test_params_as_text_or_in_a_file(tmp_path: Path) -> None:
    assert read_params('{"n": [1, {"m": null}]}') == {"n": [1, {"m": None}]}
    file = tmp_path / "params.json"
    file.write_text('{"letter": "e"}')
    assert read_params(f"@{file}") == {"letter": "e"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("token_ids=3", "'token_ids=3' is not JSON"),
        ("[1]", "must be a JSON object, not list"),
        ("@/nowhere/params.json", "cannot read '/nowhere/params.json'"),
    ],
)
def test_params_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_params(text)
    assert message in str(refused.value)
