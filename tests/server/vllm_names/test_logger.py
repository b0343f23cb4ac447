from __future__ import annotations

import logging
from typing import Any

import pytest

from logitship.server.vllm_names.logger import init_logger


def test_init_logger_returns_the_standard_logger() -> None:
    assert init_logger("plugin.one") is logging.getLogger("plugin.one")


def test_once_is_per_logger_level_and_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    one: Any = init_logger("plugin.two")
    other: Any = init_logger("plugin.three")
    for _ in range(3):
        one.warning_once("%s of %d", "first", 1)
        one.warning_once("%s of %d", "second", 1, scope="global")
        one.error_once("%s of %d", "first", 1)
        other.warning_once("%s of %d", "first", 1)
        init_logger("plugin.two").info("every time")
    assert [record for record in caplog.record_tuples if record[2] != "every time"] == [
        ("plugin.two", logging.WARNING, "first of 1"),
        ("plugin.two", logging.WARNING, "second of 1"),
        ("plugin.two", logging.ERROR, "first of 1"),
        ("plugin.three", logging.WARNING, "first of 1"),
    ]
    assert caplog.messages.count("every time") == 3


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_record_has_the_callers_line(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    getattr(init_logger("plugin.four"), f"{level}_once")("here")
    assert caplog.records[0].filename == "test_logger.py"
    assert caplog.records[0].levelname == level.upper()
