"""Fixtures with a real browser. Pages may only send requests to their own server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, expect, sync_playwright

from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel

CHROMIUM = Path(__file__).parents[2] / "peers" / "chromium.sh"
FOREIGN_NAME = "evil.example"
"""A host name that the browser resolves to this machine, as after DNS rebinding."""
PATIENCE = 120_000
"""Timeout of an expectation in milliseconds, for a busy machine."""


@dataclass
class Playground:
    """The page, open in a browser.

    Attributes:
        page: Playwright's page.
        url: base URL of its server.
        console_errors: errors and warnings in the browser's console, including violations of the content policy.
        foreign_requests: URLs of blocked requests to other servers.
    """

    page: Page
    url: str
    console_errors: list[str] = field(default_factory=list)
    foreign_requests: list[str] = field(default_factory=list)
    _expected: list[str] = field(default_factory=list)

    def open(self, path: str = "/") -> None:
        """Open a path, and wait until the page is connected to its server."""
        self.page.goto(self.url + path)
        expect(self.page.locator("#run")).to_be_enabled()

    def choose(self, processor: str) -> None:
        """Choose a processor by its option value, and wait until an example's source is loaded."""
        self.page.select_option("#processor", processor)
        kind, _, name = processor.partition(":")
        if kind == "example":
            cls = "".join(part.title() for part in name.split("_"))
            expect(self.page.locator(".cm-content")).to_contain_text(f"class {cls}(")

    def write(self, source: str) -> None:
        """Type a processor into the editor."""
        content = self.page.locator(".cm-content")
        content.click()
        self.page.keyboard.press("ControlOrMeta+a")
        # If text were selected, Chromium would try to keep its style, which the content policy forbids.
        self.page.keyboard.press("Delete")
        self.page.keyboard.insert_text(source)

    def run(self, *, fails: bool = False) -> None:
        """Click Run, and wait for both answers."""
        self.page.click("#run")
        self.finish(fails=fails)

    def finish(self, *, fails: bool = False) -> None:
        """Wait for both answers."""
        expect(self.page.locator("#without")).to_have_attribute("data-state", "done")
        expect(self.page.locator("#with")).to_have_attribute("data-state", "failed" if fails else "done")

    def tokens(self, column: str) -> Any:
        """Return the tokens of a column."""
        return self.page.locator(f"#{column}-tokens [role=option]")

    def text(self, column: str) -> str:
        """Return the text of an answer, without the names of tokens that add no text."""
        return "".join(self.page.locator(f"#{column}-tokens [role=option]:not(.unseen)").all_text_contents())

    def expect_console_error(self, text: str) -> None:
        """Allow console errors with this text: the browser logs failed requests there."""
        self._expected.append(text)

    def check(self) -> None:
        """Check that there were no unexpected console errors and no requests to other servers."""
        assert [each for each in self.console_errors if not any(text in each for text in self._expected)] == []
        assert self.foreign_requests == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium. Module scope: its event loop occupies this thread, where other test files run their own."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    path = subprocess.run([CHROMIUM], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.strip()
    arguments = [f"--host-resolver-rules=MAP {FOREIGN_NAME} 127.0.0.1"]
    # Each window would run two pages for the address bar, which nobody sees, in a process of their own.
    arguments.append("--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup")
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE)
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tiny_server(loaded_model: LoadedModel) -> Iterator[str]:
    """Base URL of a server on the tiny model that runs shipped code in its own process."""
    config = ServerConfig(
        model_path="tiny",
        port=0,
        max_num_seqs=4,
        random_seed=0,
        enable_custom_logit_processor=True,
        processor_isolation="none",
        log_level="error",
    )
    with running_server(config, build_engine(config, loaded_model)) as url:
        yield url


class Pages:
    """Opens pages, each in a browser profile of its own, and checks them at the end."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._opened: list[tuple[BrowserContext, Playground]] = []

    def new(self, url: str, **options: Any) -> Playground:
        """Return a page that is not open yet. Options are those of a browser context."""
        options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
        context = self._browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        playground = Playground(context.new_page(), url)
        self._opened.append((context, playground))

        def block_foreign_requests(route: Route) -> None:
            if route.request.url.startswith(f"{url}/"):
                route.fallback()
            else:
                playground.foreign_requests.append(route.request.url)
                route.abort()

        context.route("**/*", block_foreign_requests)
        page = playground.page

        def listen(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                playground.console_errors.append(message.text)

        page.on("pageerror", lambda error: playground.console_errors.append(str(error)))
        page.on("console", listen)
        return playground

    def close(self) -> None:
        """Close and check all pages."""
        for context, _ in self._opened:
            context.close()
        for _, playground in self._opened:
            playground.check()


@pytest.fixture
def pages(browser: Browser) -> Iterator[Pages]:
    """Open pages, which are checked after the test."""
    pages = Pages(browser)
    yield pages
    pages.close()


@pytest.fixture
def playground(pages: Pages, tiny_server: str) -> Playground:
    """The page on the tiny model, at desktop size."""
    playground = pages.new(tiny_server)
    playground.open()
    return playground


@dataclass
class Gate:
    """Events that synchronize `WAITING_PROCESSOR` with the test.

    Wait for them only when the page has sent its requests: this thread passes them on, and not while it waits here.
    """

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


WAITING_PROCESSOR = """from logitship import CustomLogitProcessor


class Waits(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        import gate_of_the_test  # a new module for each test

        if len(custom_param_list[0]["__req__"].output_ids) == 4:
            gate_of_the_test.gate.reached.set()
            assert gate_of_the_test.gate.opened.wait(60)
        return logits
"""
"""A processor that blocks the engine after four tokens."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The gate of `WAITING_PROCESSOR`."""
    gate = Gate()
    module = ModuleType("gate_of_the_test")
    module.gate = gate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gate_of_the_test", module)
    yield gate
    gate.opened.set()
