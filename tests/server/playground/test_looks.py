"""Accessibility and layout on desktop and phone, in light and dark; and the screenshots of the documentation.

`LOGITSHIP_SCREENSHOTS=1 pytest tests/server/playground/test_looks.py` renews the screenshots in `docs/images`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from logitship.server.config import ServerConfig
from logitship.server.http_server import running_server

from .conftest import Pages, Playground

IMAGES = Path(__file__).parents[3] / "docs" / "images"
DESK = {"width": 1360, "height": 880}
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
BROKEN = "from logitship import CustomLogitProcessor\n\n1 / 0\nclass A(CustomLogitProcessor): ...\n"


def violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in found for node in each["nodes"]]


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def states(playground: Playground) -> Iterator[str]:
    """Bring the page into each of its states, and yield their names."""
    page = playground.page
    page.fill("#sampling-max_tokens", "8")
    yield "initial"
    playground.run()
    playground.tokens("with").nth(2).click()
    yield "traced"
    page.get_by_role("button", name="more").click()
    yield "traced in full"
    playground.expect_console_error("400 (Bad Request)")
    page.fill("#sampling-temperature", "-1")
    playground.write(BROKEN)
    page.click("#run")
    expect(page.locator("#with")).to_have_attribute("data-state", "failed")
    expect(page.locator("#without")).to_have_attribute("data-state", "failed")
    yield "refused"
    page.fill("#sampling-temperature", "0.7")
    playground.run(fails=True)
    yield "failed"
    page.fill("#params", "{")
    page.click("#run")
    expect(page.locator("#banner")).to_be_visible()
    yield "invalid"
    page.select_option("#processor", "named:disallowed_tokens")
    yield "named"
    page.fill("#params", '{"token_ids": [5]}')
    page.click("#copy-as")
    yield "copying"
    page.click("#program-close")
    page.click("#key-open")
    yield "asking"


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("profile", [{}, PHONE], ids=["desk", "phone"])
def test_accessibility(profile: dict[str, Any], colours: str, pages: Pages, tiny_server: str) -> None:
    playground = pages.new(tiny_server, color_scheme=colours, **profile)
    playground.open()
    for state in states(playground):
        assert (state, violations(playground.page)) == (state, [])
        assert (state, scrolls_sideways(playground.page)) == (state, False)


def test_long_words_fit_on_phone(pages: Pages, tiny_server: str) -> None:
    playground = pages.new(tiny_server, **PHONE)
    playground.open()
    page = playground.page
    playground.choose("example:template")
    page.fill("#params", '{"template": "' + "W" * 120 + '"}')
    page.fill("#sampling-max_tokens", "120")
    playground.run()
    playground.tokens("with").nth(3).tap()
    assert not scrolls_sideways(page)


def test_touch_targets_are_large_enough(pages: Pages, tiny_server: str) -> None:
    playground = pages.new(tiny_server, **PHONE)
    playground.open()
    controls = playground.page.locator(
        "button:visible, select:visible, input:visible:not([type=radio]), .switch label:visible"
    )
    for control in controls.all():
        box = control.bounding_box()
        assert box is not None
        assert box["height"] >= 40, control
        assert box["width"] >= 40, control


def test_answers_scroll_into_view_on_phone(pages: Pages, tiny_server: str) -> None:
    playground = pages.new(tiny_server, **PHONE)
    playground.open()
    playground.page.fill("#sampling-max_tokens", "4")
    playground.page.tap("#run")
    playground.finish()
    expect(playground.page.locator("#without")).to_be_in_viewport()
    expect(playground.page.locator("#stop")).to_be_in_viewport()


def test_trace_scrolls_into_view_on_phone(pages: Pages, tiny_server: str) -> None:
    playground = pages.new(tiny_server, **PHONE | {"viewport": {"width": 390, "height": 844}})
    playground.open()
    page = playground.page
    page.fill("#sampling-max_tokens", "120")
    playground.run()
    page.evaluate("scrollTo(0, 0)")
    token = playground.tokens("without").first
    token.scroll_into_view_if_needed()
    token.tap()
    expect(page.locator("#trace h2")).to_be_in_viewport(ratio=1)
    # The end of the page is above the Run bar, also after it was reached by keyboard.
    page.locator("#trace .more").focus()
    more, bar = page.locator("#trace .more").bounding_box(), page.locator(".run-bar").bounding_box()
    assert more is not None
    assert bar is not None
    assert more["y"] + more["height"] <= bar["y"]


def test_theme(playground: Playground) -> None:
    page = playground.page
    background = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(background)
    assert light != dark
    button = page.locator("#theme")
    expect(button).to_have_text("Theme: Auto")
    button.click()
    expect(button).to_have_text("Theme: Light")
    assert page.evaluate(background) == light
    playground.open()
    expect(button).to_have_text("Theme: Light")
    button.click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == dark


def test_focus_is_visible(playground: Playground) -> None:
    page = playground.page
    page.fill("#sampling-max_tokens", "3")
    playground.run()
    page.focus("#prompt")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Escape")  # lets Tab leave the editor
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
                let element = document.activeElement;
                while (element.shadowRoot?.activeElement) element = element.shadowRoot.activeElement;
                const shown = element.matches(".cm-content") ? element.closest(".cm-editor")
                    : element.name === "mode" ? element.nextElementSibling : element;
                return [element.id || element.className || element.tagName, getComputedStyle(shown).outlineStyle];
            }"""
        )
        if name == "BODY":  # after the last one
            break
        seen.add(name)
        assert (name, outline) == (name, "solid")
    assert {"processor", "params", "sampling-seed", "run"} <= seen
    assert any("cm-content" in name for name in seen)
    assert any("token" in name for name in seen)


# --- screenshots, on the default model ---


@pytest.fixture(scope="module")
def real_server() -> Iterator[str]:
    """Base URL of a server with the default model and sandboxes, as in the README."""
    config = ServerConfig(port=0, enable_custom_logit_processor=True, max_model_len=1024, log_level="error")
    with running_server(config) as url:
        yield url


def shoot(page: Page, name: str, tmp_path: Path, **options: Any) -> None:
    """Make a screenshot, and check its size."""
    folder = IMAGES if os.environ.get("LOGITSHIP_SCREENSHOTS") else tmp_path
    folder.mkdir(exist_ok=True)
    file = folder / f"playground-{name}.png"
    page.mouse.move(0, 0)
    page.screenshot(path=file, animations="disabled", caret="hide", **options)
    content = file.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) > (700, 700)
    # An empty image is far smaller. The upper limit keeps the README fast to load.
    assert 20_000 < len(content) < 250_000, len(content)


def real(pages: Pages, url: str, **options: Any) -> Playground:
    playground = pages.new(url, **options)
    playground.open()
    return playground


def test_desk(real_server: str, pages: Pages, tmp_path: Path) -> None:
    playground = real(pages, real_server, viewport=DESK)
    page = playground.page
    playground.run()
    assert "e" not in playground.text("with").lower()
    assert "e" in playground.text("without").lower()
    page.locator("#with-tokens .token.forbidden").nth(1).click()
    expect(page.locator("#trace .summary")).to_contain_text("The first choice was forbidden")
    page.evaluate("scrollTo(0, 0)")
    shoot(page, "desk", tmp_path)


def test_trace(real_server: str, pages: Pages, tmp_path: Path) -> None:
    playground = real(pages, real_server, viewport={"width": 1360, "height": 1200})
    page = playground.page
    playground.choose("example:alliteration")
    page.fill("#sampling-top_k", "5")
    playground.run()
    page.locator("#with-tokens .token.changed").first.click()
    expect(page.locator("#trace .summary")).to_contain_text("The first choice changed")
    expect(page.locator("#trace td.sampling", has_text="filtered").first).to_be_visible()
    answers, trace = page.locator(".columns").bounding_box(), page.locator("#trace").bounding_box()
    assert answers is not None
    assert trace is not None
    whole = {
        "x": answers["x"] - 12,
        "y": answers["y"] - 12,
        "width": answers["width"] + 24,
        "height": trace["y"] + trace["height"] - answers["y"] + 24,
    }
    shoot(page, "trace", tmp_path, clip=whole)


def test_dark(real_server: str, pages: Pages, tmp_path: Path) -> None:
    playground = real(pages, real_server, viewport=DESK, color_scheme="dark")
    page = playground.page
    playground.choose("example:template")
    playground.run()
    assert re.match(r"At \d\d:\d\d from platform \d\.", playground.text("with"))
    page.locator("#with-tokens .token.forced").nth(1).click()
    page.evaluate("scrollTo(0, 0)")
    shoot(page, "dark", tmp_path)


def test_error(real_server: str, pages: Pages, tmp_path: Path) -> None:
    playground = real(pages, real_server, viewport=DESK)
    page = playground.page
    playground.choose("example:broken")
    playground.run(fails=True)
    expect(page.locator("#editor .error-line")).to_contain_text('params["token_id"]')
    page.evaluate("scrollTo(0, 0)")
    shoot(page, "error", tmp_path)


LOOPS = """import torch

from logitship import CustomLogitProcessor


class Loops(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        print("called")
        while len(custom_param_list[0]["__req__"].output_ids) == 2:
            pass
        return logits
"""


def test_timeout_marks_the_line(real_server: str, pages: Pages) -> None:
    playground = real(pages, real_server)
    page = playground.page
    playground.write(LOOPS)
    for _ in range(5):  # on a busy machine, the process may be killed before it has written where it is
        playground.run(fails=True)
        expect(page.locator("#results")).to_contain_text("gave no answer")
        if page.locator("#editor .error-line").count():
            break
    expect(page.locator("#editor .error-line")).to_have_text(re.compile("while len|pass"))
    expect(page.locator("#code-error")).to_contain_text("Go to line")
    expect(page.locator("#code-error pre")).to_contain_text("called")


PRINTS = """import sys
from logitship import CustomLogitProcessor


class Prints(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        print("<b>step", len(custom_param_list[0]["__req__"].output_ids))
        print("warned", file=sys.stderr)
        return logits
"""


def test_prints_are_under_the_answer(real_server: str, pages: Pages) -> None:
    playground = real(pages, real_server)
    page = playground.page
    page.fill("#sampling-max_tokens", "2")
    playground.write(PRINTS)
    playground.run()
    printed = page.get_by_label("Printed by Prints")
    expect(printed).to_have_text("<b>step 0\nwarned\n<b>step 1\nwarned\n")
    answer, shown = page.locator("#with-tokens").bounding_box(), printed.bounding_box()
    assert answer is not None
    assert shown is not None
    assert shown["y"] >= answer["y"] + answer["height"]


def test_phone(real_server: str, pages: Pages, tmp_path: Path) -> None:
    larger = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
    playground = real(pages, real_server, **PHONE | larger)
    page = playground.page
    playground.run()
    page.locator("#with-tokens .token.forbidden").nth(1).tap()
    page.locator("#with").evaluate("column => scrollTo(0, column.offsetTop - 12)")
    shoot(page, "phone", tmp_path)
