from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from logitship.server.http.playground_routes import FOLDER, playground_files

FILES = playground_files()
TEXTS = [file for file in FOLDER.rglob("*") if file.suffix in (".html", ".css", ".js", ".py", ".json")]
OURS = [file for file in TEXTS if file.parent.name != "vendor"]


def test_every_file_is_served() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sorted(file.content for file in FILES.values()) == sorted(file.read_bytes() for file in files)


@pytest.mark.parametrize("path", FILES)
def test_file_headers(path: str, client: Any) -> None:
    answer = client.http.get(path)
    assert answer.status_code == 200
    assert answer.content == FILES[path].content
    kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "woff2": "font/woff2"}
    kinds |= {"json": "application/json", "svg": "image/svg+xml"}
    plain = "text/html; charset=utf-8" if path == "/" else "text/plain; charset=utf-8"
    assert answer.headers["content-type"] == kinds.get(path.rpartition(".")[2], plain)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_policy_allows_only_the_server_itself(client: Any) -> None:
    policy = client.http.get("/").headers["content-security-policy"]
    directives = dict(directive.strip().split(" ", 1) for directive in policy.split(";"))
    assert directives.pop("default-src") == "'none'"
    assert set(directives.values()) == {"'self'", "'none'"}
    assert directives["script-src"] == "'self'"
    assert directives["frame-ancestors"] == directives["base-uri"] == directives["form-action"] == "'none'"


def test_etag_revalidation(client: Any) -> None:
    first = client.http.get("/playground/main.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for value in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = client.http.get("/playground/main.js", headers={"If-None-Match": value})
        assert again.status_code == 304
        assert again.content == b""
        assert again.headers["etag"] == tag
    assert client.http.get("/playground/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/playground",
        "/playground/",
        "/playground/index.html",
        "/playground/nothing.js",
        "/playground/../http/auth.py",
        "/playground/%2e%2e/http/auth.py",
        "/playground/..%2fhttp%2fauth.py",
        "/playground//main.js",
    ],
)
def test_unknown_paths(path: str, client: Any) -> None:
    assert client.http.get(path).status_code == 404


def test_only_the_files_are_open(make_fake_engine: Any, make_client: Any) -> None:
    locked = make_client(make_fake_engine(api_key="key"))
    assert locked.http.get("/").status_code == 200
    assert locked.http.get("/playground/main.js").status_code == 200
    for path in ("/playground/", "/playground/nothing.js", "/v1/models", "/server_info", "/playground//main.js"):
        assert locked.http.get(path).status_code == 401
    assert locked.http.post("/").status_code == 405


def test_disabled(make_fake_engine: Any, make_client: Any) -> None:
    client = make_client(make_fake_engine(disable_playground=True))
    assert client.http.get("/").status_code == 404
    assert client.http.get("/playground/main.js").status_code == 404
    assert "/" not in client.http.get("/openapi.json").json()["paths"]


def test_disabled_with_keys(make_fake_engine: Any, make_client: Any) -> None:
    client = make_client(make_fake_engine(disable_playground=True, api_key="key"))
    assert client.http.get("/").status_code == 401


def test_unknown_suffix_is_not_served(tmp_path: Path) -> None:
    for name in ("index.html", "a.js", "secret.pem", "sub/b.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(playground_files(tmp_path)) == ["/playground/a.js", "/", "/playground/sub/b.css"]


# --- offline, and nothing that the policy would refuse ---


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_no_external_resources(file: Path) -> None:
    addresses = re.findall(r"https?://[^\s\"')]+", file.read_text())
    assert [address for address in addresses if address != "http://www.w3.org/2000/svg"] == []


def test_no_inline_script_or_style() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    assert all("src=" in script for script in re.findall(r"<script[^>]*>", page))
    assert re.findall(r"<script[^>]*>(.+?)</script>", page) == []


@pytest.mark.parametrize("file", [file for file in OURS if file.suffix == ".js"], ids=lambda file: file.name)
def test_no_markup_from_text(file: Path) -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert re.findall(markup, file.read_text()) == []


def test_vendored_packages_have_licenses() -> None:
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    for package in ("@codemirror/view", "@lezer/python", "style-mod", "@fontsource-variable/inter"):
        assert re.search(rf"^{re.escape(package)} [\d.]+ \(", licences, re.MULTILINE)
