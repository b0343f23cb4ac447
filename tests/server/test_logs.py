from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from logitship.server.logs import JSONFormatter, TextFormatter, current_request_id, set_up_logging


@pytest.fixture
def in_request() -> Iterator[None]:
    token = current_request_id.set("mine")
    yield
    current_request_id.reset(token)


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("logitship.test", logging.WARNING, "file.py", 1, message, args, more.pop("exc_info", None))
    made.__dict__.update(more)
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JSONFormatter().format(made)
    assert "\n" not in line
    read: dict[str, Any] = orjson.loads(line)
    return read


def test_json_line() -> None:
    line = as_json(record("%d of %s", 3, "them", fields={"status": 200, "processors": [{"name": "A"}]}))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "logitship.test",
        "message": "3 of them",
        "status": 200,
        "processors": [{"name": "A"}],
    }


@pytest.mark.usefixtures("in_request")
def test_lines_within_a_request_have_its_id() -> None:
    assert as_json(record("x"))["request_id"] == "mine"
    assert TextFormatter().format(record("x")).endswith("WARNING logitship.test: x [mine]")


def test_lines_outside_of_requests_have_no_id() -> None:
    assert "request_id" not in as_json(record("x"))
    assert TextFormatter().format(record("x")).endswith("WARNING logitship.test: x")


def raised() -> tuple[type[BaseException], BaseException, Any]:
    try:
        raise ValueError("no such luck")
    except ValueError as error:
        return type(error), error, error.__traceback__


@pytest.mark.usefixtures("in_request")
def test_exceptions() -> None:
    assert as_json(record("x", exc_info=raised()))["exception"].endswith("ValueError: no such luck")
    line, *traceback = TextFormatter().format(record("x", exc_info=raised())).splitlines()
    assert line.endswith("x [mine]")
    assert traceback[-1] == "ValueError: no such luck"


def test_multiline_message_is_one_json_line() -> None:
    assert as_json(record('a\nb"\x00'))["message"] == 'a\nb"\x00'


def test_unencodable_values_do_not_lose_the_line() -> None:
    line = as_json(record("half a pair: \ud800", fields={"id": "\ud800", "set": {1}, "path": "é"}))
    assert line["message"] == "half a pair: ?"
    assert (line["id"], line["set"], line["path"]) == ("?", "{1}", "é")


def test_fields_are_truncated() -> None:
    line = as_json(record("x", fields={"text": "a" * 1000, "ids": ["b" * 1000] * 1000, "deep": {"c": "d" * 1000}}))
    assert len(line["text"]) == len(line["ids"][0]) == len(line["deep"]["c"]) == 256
    assert len(line["ids"]) == 32


@contextlib.contextmanager
def new_root_logger() -> Iterator[None]:
    """Reset the root logger. Not a fixture: pytest adds its handlers after those."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(level)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_set_up(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    with new_root_logger():
        set_up_logging(level, "json")
        for name in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("logitship.test_logs"), name)(name)
    shown = [orjson.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["debug", "info", "warning", "error"][["debug", "info", "warning", "error"].index(level) :]


def test_set_up_text(capsys: pytest.CaptureFixture[str]) -> None:
    with new_root_logger():
        set_up_logging("info", "text")
        logging.getLogger("logitship.test_logs").info("hello")
    assert capsys.readouterr().err.endswith(" INFO logitship.test_logs: hello\n")
