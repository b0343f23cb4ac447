from __future__ import annotations

import re
from typing import Any


def test_page_loads_local_files_only(client: Any) -> None:
    page = client.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text) + re.findall(r"url: '([^']+)'", page.text)
    assert sorted(loaded) == ["docs/favicon.png", "docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "openapi.json"]
    assert "http://" not in page.text.replace("http://localhost", "")
    assert "https://" not in page.text
    for path in loaded:
        answer = client.http.get(f"/{path}")
        assert answer.status_code == 200
        assert len(answer.content) > 200


def test_routes_are_not_in_the_openapi_document(client: Any) -> None:
    assert not [path for path in client.http.get("/openapi.json").json()["paths"] if path.startswith("/docs")]


def test_fastapis_own_pages_are_disabled(client: Any) -> None:
    assert client.http.get("/redoc").status_code == 404


def test_other_files_are_not_served(client: Any) -> None:
    for path in ("/docs/redoc.standalone.js", "/docs/../pyproject.toml", "/docs/..%2f__init__.py", "/docs/"):
        assert client.http.get(path, follow_redirects=False).status_code in (307, 404)
