"""A transport of httpx to an application in this process."""

from __future__ import annotations

import httpx
from starlette.testclient import TestClient


class AppTransport(httpx.BaseTransport):
    """Passes requests of an httpx client on to a test client, which may use another version of httpx.

    Args:
        http: the test client of the application.
    """

    def __init__(self, http: TestClient) -> None:
        self._http = http

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        answer = self._http.request(request.method, path, content=request.read(), headers=dict(request.headers))
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)
