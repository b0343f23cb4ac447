"""Failures of running requests, as clients see them."""

from __future__ import annotations

import pytest

from logitship.client.errors import ProcessorFault
from logitship.server.engine.failures import request_error

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "ban.py", line 7, in __call__\n'
    '    logits[i, p["token"]] = 0\n'
    "KeyError: 'token'\n"
)


@pytest.mark.parametrize(
    ("traceback", "message"),
    [
        (TRACEBACK, 'it failed (ban.py, line 7, in __call__: logits[i, p["token"]] = 0)'),
        ("", "it failed"),
        (TRACEBACK.replace("    logits[i", "logits[i"), "it failed"),
    ],
)
def test_message_has_the_author_s_line(traceback: str, message: str) -> None:
    fault = ProcessorFault("it failed", digest="sha256:1", name="Ban", kind="exception", traceback=traceback)
    error = request_error(fault)
    assert (error.message, error.traceback, error.name) == (message, traceback, "Ban")
