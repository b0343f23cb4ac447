"""A real browser, and a page that may talk to its own server alone."""

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
PATIENCE = 30_000
"""Milliseconds that an expectation may take on a busy machine."""


@dataclass
class Playground:
    """The page, open in a browser.

    Attributes:
        page: Playwright's handle of it.
        url: base URL of its server.
        complaints: what the browser's console says that it should not: errors, and what the page's policy refused.
        strangers: requests that went, or wanted to go, to anybody but the server.
    """

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    _expected: list[str] = field(default_factory=list)

    def open(self, path: str = "/") -> None:
        """Go there, and wait until the page knows its server."""
        self.page.goto(self.url + path)
        expect(self.page.locator("#run")).to_be_enabled()

    def choose(self, processor: str) -> None:
        """Choose an example, by its id, and wait until its source is there."""
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
        # Over a selection, Chromium itself would try to keep the style of what it replaces, which the policy refuses.
        self.page.keyboard.press("Delete")
        self.page.keyboard.insert_text(source)

    def run(self, *, fails: bool = False) -> None:
        """Run, and wait for both answers."""
        self.page.click("#run")
        self.finish(fails=fails)

    def finish(self, *, fails: bool = False) -> None:
        """Wait for both answers."""
        expect(self.page.locator("#without")).to_have_attribute("data-state", "done")
        expect(self.page.locator("#with")).to_have_attribute("data-state", "failed" if fails else "done")

    def tokens(self, column: str) -> Any:
        """The tokens of a column."""
        return self.page.locator(f"#{column}-tokens [role=option]")

    def text(self, column: str) -> str:
        """The text of an answer: without the names of tokens that add none."""
        return "".join(self.page.locator(f"#{column}-tokens [role=option]:not(.unseen)").all_text_contents())

    def expect_complaint(self, text: str) -> None:
        """The browser reports failed requests to its console; such a one is meant."""
        self._expected.append(text)

    def check(self) -> None:
        """Nothing was said that is not expected, and nobody else was asked for anything."""
        assert [each for each in self.complaints if not any(text in each for text in self._expected)] == []
        assert self.strangers == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium. For a file: while it is there, an event loop runs in this thread, and others want theirs."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    path = subprocess.run([CHROMIUM], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.strip()
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE)
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tiny_server(loaded_model: LoadedModel) -> Iterator[str]:
    """Base URL of a server on the tiny model, which runs shipped code in its own process."""
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
    """Opens pages, each in a profile of its own, and looks at the end at what they did."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._opened: list[tuple[BrowserContext, Playground]] = []

    def new(self, url: str, **options: Any) -> Playground:
        """A page that is not open yet. Options are those of a browser's profile."""
        options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
        context = self._browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        playground = Playground(context.new_page(), url)
        self._opened.append((context, playground))

        def refuse_strangers(route: Route) -> None:
            if route.request.url.startswith(f"{url}/"):
                route.fallback()
            else:
                playground.strangers.append(route.request.url)
                route.abort()

        context.route("**/*", refuse_strangers)
        page = playground.page

        def listen(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                playground.complaints.append(message.text)

        page.on("pageerror", lambda error: playground.complaints.append(str(error)))
        page.on("console", listen)
        return playground

    def close(self) -> None:
        """Check and close all of them."""
        for context, _ in self._opened:
            context.close()
        for _, playground in self._opened:
            playground.check()


@pytest.fixture
def pages(browser: Browser) -> Iterator[Pages]:
    """Opens pages."""
    pages = Pages(browser)
    yield pages
    pages.close()


@pytest.fixture
def playground(pages: Pages, tiny_server: str) -> Playground:
    """The page on the tiny model, on a desk."""
    playground = pages.new(tiny_server)
    playground.open()
    return playground


@dataclass
class Gate:
    """Where `HELD` waits until the test lets it through."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


HELD = """from logitship import CustomLogitProcessor


class Held(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        import gate_of_the_test  # a new one for each test

        if len(custom_param_list[0]["__req__"].output_ids) == 4:
            gate_of_the_test.gate.reached.set()
            assert gate_of_the_test.gate.opened.wait(60)
        return logits
"""
"""A processor that stops the engine after four tokens."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The gate that `HELD` waits at."""
    gate = Gate()
    module = ModuleType("gate_of_the_test")
    module.gate = gate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gate_of_the_test", module)
    yield gate
    gate.opened.set()
