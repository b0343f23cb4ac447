"""Web pages of other sites, open in a real browser, against a server without API keys on the same machine."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel

from .conftest import FOREIGN_NAME, PATIENCE, Playground

ATTACK = {
    "text": "a",
    "sampling_params": {"max_new_tokens": 2},
    "custom_logit_processor": {
        "class_name": "Attack",
        "source": """from logitship import CustomLogitProcessor


class Attack(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        import attacked_by_a_page  # a new module for each test

        attacked_by_a_page.ran.set()
        return logits
""",
    },
}
HOSTS = ["127.0.0.1", "localhost", FOREIGN_NAME]
"""Hosts of the page: the same site on another port, another name of this machine, another site."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the code of `ATTACK` runs in the server."""
    module = ModuleType("attacked_by_a_page")
    module.ran = threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attacked_by_a_page", module)
    return module.ran  # type: ignore[attr-defined, no-any-return]


class _EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>another site</title><body>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def page_port() -> Iterator[int]:
    """Port of a web server with an empty page."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _EmptyPage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@dataclass
class Site:
    """A page of another site, open in the browser.

    Attributes:
        page: Playwright's page.
        target: base URL of the server.
    """

    page: Page
    target: str

    def fetch(self, path: str, **options: Any) -> Any:
        """Call `fetch` in the page. Returns the text of the response; None where the page cannot read it."""
        script = """async ([url, options]) => {
            try { return await (await fetch(url, options)).text() } catch { return null }
        }"""
        return self.page.evaluate(script, [self.target + path, options])


@pytest.fixture
def open_site(browser: Browser, page_port: int) -> Iterator[Callable[[str, str], Site]]:
    """Opens an empty page on this host, which attacks the server with this URL."""
    contexts = []

    def open_site(host: str, target: str) -> Site:
        contexts.append(browser.new_context())
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"http://{host}:{page_port}/")
        return Site(page, target)

    yield open_site
    for context in contexts:
        context.close()


def total(url: str, metric: str) -> float:
    """Return the sum of a counter's values with these labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(metric, line))


def generated(url: str) -> float:
    """Return the number of requests that the server admitted so far."""
    return total(url, "logitship_requests_total ")


def refused(url: str) -> float:
    """Return the number of HTTP requests that the server refused with 403 so far."""
    return total(url, 'logitship_http_requests_total{.*status="403"')


@pytest.fixture
def untouched(tiny_server: str, ran: threading.Event) -> Iterator[str]:
    """Base URL of a server on which a program may generate and run code, but the test's pages did not."""
    before, refused_before = generated(tiny_server), refused(tiny_server)
    yield tiny_server
    assert refused(tiny_server) > refused_before
    assert not ran.is_set()
    assert generated(tiny_server) == before
    # The attack works without a browser.
    assert httpx.post(f"{tiny_server}/generate", json=ATTACK, timeout=60).status_code == 200
    assert ran.is_set()
    assert generated(tiny_server) == before + 1


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("mode", ["cors", "no-cors"])
def test_simple_post(host: str, mode: str, untouched: str, open_site: Callable[..., Site]) -> None:
    site = open_site(host, untouched)
    for path in ("/generate", "/v1/processors"):
        kind = {"Content-Type": "text/plain"}
        answer = site.fetch(path, method="POST", mode=mode, body=json.dumps(ATTACK), headers=kind)
        assert answer == (None if mode == "cors" else "")


@pytest.mark.parametrize("host", HOSTS)
def test_json_post_with_preflight(host: str, untouched: str, open_site: Callable[..., Site]) -> None:
    site = open_site(host, untouched)
    kind = {"Content-Type": "application/json"}
    assert site.fetch("/generate", method="POST", body=json.dumps(ATTACK), headers=kind) is None


@pytest.mark.parametrize("host", HOSTS)
def test_beacon_without_content_type(host: str, untouched: str, open_site: Callable[..., Site]) -> None:
    site = open_site(host, untouched)
    script = "([url, body]) => navigator.sendBeacon(url, new Blob([body]))"
    with site.page.expect_response(f"{untouched}/generate") as sent:
        assert site.page.evaluate(script, [f"{untouched}/generate", json.dumps(ATTACK)])
    assert sent.value.status == 403


@pytest.mark.parametrize("host", HOSTS)
def test_form_post(host: str, untouched: str, open_site: Callable[..., Site]) -> None:
    site = open_site(host, untouched)
    # In text/plain, a form sends `name=value`: the = is in a string.
    name, value = json.dumps(ATTACK)[:-1] + ', "rid": "', '"}'
    script = """([url, name, value]) => {
        const form = document.createElement("form")
        Object.assign(form, {action: url, method: "POST", enctype: "text/plain"})
        const input = document.createElement("input")
        Object.assign(input, {name, value})
        form.append(input)
        document.body.append(form)
        form.submit()
    }"""
    with site.page.expect_navigation():
        site.page.evaluate(script, [f"{untouched}/generate", name, value])
    expect(site.page.locator("body")).to_contain_text("--allowed-origin")


@pytest.mark.parametrize("host", HOSTS)
def test_web_socket(host: str, untouched: str, open_site: Callable[..., Site]) -> None:
    site = open_site(host, untouched)
    script = """url => new Promise(done => {
        const socket = new WebSocket(url)
        socket.onopen = () => done("open")
        socket.onerror = () => done("refused")
    })"""
    assert site.page.evaluate(script, untouched.replace("http:", "ws:") + "/generate") == "refused"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", ["/health_generate", "/flush_cache", "/v1/models"])
def test_image(host: str, path: str, untouched: str, open_site: Callable[..., Site]) -> None:
    site = open_site(host, untouched)
    script = "url => new Promise(done => Object.assign(new Image(), {onload: done, onerror: done, src: url}))"
    site.page.evaluate(script, untouched + path)


def test_foreign_host(untouched: str, open_site: Callable[..., Site]) -> None:
    """After DNS rebinding, a page of another site has the server's port: the browser takes both for one origin."""
    rebound = untouched.replace("127.0.0.1", FOREIGN_NAME)
    site = open_site("127.0.0.1", rebound)
    response = site.page.goto(f"{rebound}/")
    assert response is not None
    assert response.status == 403
    expect(site.page.locator("body")).to_contain_text(f"--allowed-host {FOREIGN_NAME}")
    kind = {"Content-Type": "application/json"}
    answer = site.fetch("/generate", method="POST", body=json.dumps(ATTACK), headers=kind)
    assert "--allowed-host" in answer  # it is the page's own origin, so that it can read the refusal


def test_link_to_the_playground(tiny_server: str, open_site: Callable[..., Site]) -> None:
    site = open_site(FOREIGN_NAME, tiny_server)
    script = """url => {
        const link = Object.assign(document.createElement("a"), {href: url, textContent: "the playground"})
        document.body.append(link)
    }"""
    site.page.evaluate(script, f"{tiny_server}/")
    site.page.click("a")
    expect(site.page.locator("#run")).to_be_enabled()


def test_playground_in_a_frame(untouched: str, open_site: Callable[..., Site]) -> None:
    site = open_site(FOREIGN_NAME, untouched)
    script = """url => new Promise(done => {
        document.body.append(Object.assign(document.createElement("iframe"), {onload: done, src: url}))
    })"""
    site.page.evaluate(script, f"{untouched}/")


def test_docs_send_requests(playground: Playground) -> None:
    page = playground.page
    page.goto(f"{playground.url}/docs")
    block = page.locator("#operations-SGLang-generate_generate_post")
    block.click()
    block.get_by_role("button", name="Try it out").click()
    block.locator("textarea").first.fill('{"text": "a", "sampling_params": {"max_new_tokens": 2}}')
    block.get_by_role("button", name="Execute").click()
    expect(block.locator(".live-responses-table .response-col_status").last).to_contain_text("200")


def test_allowed_origin(loaded_model: LoadedModel, page_port: int, open_site: Callable[..., Site]) -> None:
    origin = f"http://{FOREIGN_NAME}:{page_port}"
    config = ServerConfig(model_path="tiny", port=0, max_num_seqs=4, allowed_origin=origin, log_level="error")
    with running_server(config, build_engine(config, loaded_model)) as url:
        request = {
            "method": "POST",
            "headers": {"Content-Type": "application/json"},
            "body": json.dumps({"text": "a", "sampling_params": {"max_new_tokens": 2}}),
        }
        answer = json.loads(open_site(FOREIGN_NAME, url).fetch("/generate", **request))
        assert answer["meta_info"]["completion_tokens"] == 2
        assert open_site("localhost", url).fetch("/generate", **request) is None
        assert generated(url) == 1
