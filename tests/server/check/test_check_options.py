"""Options of a check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logitship.server.check.check_options import CheckOptions, UsageError, read_params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": frozenset({"speeed"})}, "no check is named 'speeed'; the checks are: serializable, contract"),
        ({"max_tokens": 1}, "max_tokens must be from 2 to 256, not 1"),
        ({"batch_sizes": [1, 0]}, r"batch_sizes must be from 1 to 256, not \[1, 0\]"),
        ({"batch_sizes": []}, "batch_sizes must be"),
        ({"prompts": [""]}, "prompt: must not be empty"),
        ({"params": [["token_ids"]]}, "params: must be an object, not list"),
        ({"params": [{"token_ids": {3, 4}}]}, "params: must be JSON, as in a request: .* set is not JSON serializable"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckOptions(**options)


def test_read_params_from_text_or_file(tmp_path: Path) -> None:
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
def test_invalid_params(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_params(text)
    assert message in str(refused.value)


def test_earlier_name_of_a_check_is_accepted() -> None:
    options = CheckOptions(ignore=frozenset({"travels", "speed"}))  # codespell:ignore travels
    assert options.ignore == {"serializable", "speed"}
