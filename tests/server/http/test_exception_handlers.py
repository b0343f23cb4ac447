from __future__ import annotations

import pytest

from logitship.server.http.exception_handlers import refusal_response
from logitship.server.refusals import (
    BadRequest,
    QueueFull,
    RequestRefused,
    ServiceUnavailable,
    ShareExceeded,
    Unauthorized,
)


@pytest.mark.parametrize(
    ("refused", "status", "retry_after"),
    [
        (BadRequest("no"), 400, None),
        (Unauthorized("no"), 401, None),
        (QueueFull("no"), 429, "1"),
        (ShareExceeded("no", retry_after=7), 429, "7"),
        (ServiceUnavailable("no"), 503, "1"),
    ],
)
def test_refusals_say_when_to_try_again(refused: RequestRefused, status: int, retry_after: str | None) -> None:
    response = refusal_response(refused)
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
