from __future__ import annotations

import re
from typing import Any


def test_the_page_and_all_that_it_loads_come_from_here(client: Any) -> None:
    page = client.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text) + re.findall(r"url: '([^']+)'", page.text)
    assert sorted(loaded) == ["docs/favicon.png", "docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "openapi.json"]
    assert "http://" not in page.text.replace("http://testserver", "")
    assert "https://" not in page.text
    for path in loaded:
        answer = client.http.get(f"/{path}")
        assert answer.status_code == 200
        assert len(answer.content) > 200


def test_they_are_not_in_the_document(client: Any) -> None:
    assert not [path for path in client.http.get("/openapi.json").json()["paths"] if path.startswith("/docs")]


def test_the_page_that_would_load_from_elsewhere_is_off(client: Any) -> None:
    assert client.http.get("/redoc").status_code == 404


def test_nothing_else_of_the_folder_is_served(client: Any) -> None:
    for path in ("/docs/redoc.standalone.js", "/docs/../pyproject.toml", "/docs/..%2f__init__.py", "/docs/"):
        assert client.http.get(path, follow_redirects=False).status_code in (307, 404)
