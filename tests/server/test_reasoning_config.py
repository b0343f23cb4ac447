from __future__ import annotations

from typing import Any

import pytest

from logitship.server.config import ServerConfig
from logitship.server.reasoning_config import ReasoningStrings, read_reasoning_config


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (
            {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"},
            ReasoningStrings("", "<a>", "</a>", "</a>"),
        ),
        (
            '{"reasoning_start_str": "<a>", "reasoning_end_str": "</a>", "reasoning_parser": ""}',
            ReasoningStrings("", "<a>", "</a>", "</a>"),
        ),
        ({"reasoning_parser": "qwen3"}, ReasoningStrings("qwen3", "<think>", "</think>", "</think>")),
        ('{"reasoning_parser": "seed_oss"}', ReasoningStrings("seed_oss", "<seed:think>", *["</seed:think>"] * 2)),
        (
            {"reasoning_parser": "deepseek_r1", "reasoning_end_str": "Time is up.</think>"},
            ReasoningStrings("deepseek_r1", "<think>", "Time is up.</think>", "</think>"),
        ),
    ],
)
def test_valid_config(given: Any, read: ReasoningStrings) -> None:
    assert read_reasoning_config(given) == read
    assert ServerConfig(reasoning_config=given).reasoning_strings == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("<think>", "is not JSON: "),
        ("5", "expected an object with reasoning_start_str and reasoning_end_str"),
        ([], "expected an object"),
        ({}, "reasoning_start_str is missing"),
        ({"reasoning_start_str": "<a>"}, "reasoning_end_str is missing: give it, or the reasoning_parser"),
        ({"reasoning_start_str": "<a>", "reasoning_end_str": ""}, "reasoning_end_str is missing"),
        ({"reasoning_start_str": 5}, "reasoning_start_str must be a string"),
        ({"reasoning_star_str": "<a>"}, "unknown key 'reasoning_star_str': did you mean reasoning_start_str?"),
        ({"x": "<a>"}, "unknown key 'x': known keys: reasoning_parser, reasoning_start_str, reasoning_end_str"),
        ({"reasoning_parser": "mine"}, "reasoning_parser 'mine' is not one of .*qwen3.*: give reasoning_start_str"),
    ],
)
def test_invalid_config_fails_at_construction(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^reasoning_config: {message}"):
        ServerConfig(reasoning_config=given)


def test_no_reasoning_config() -> None:
    assert ServerConfig().reasoning_strings is None
