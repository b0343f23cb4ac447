"""Storage: the draft in the browser, and the inputs in a link."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from .conftest import Pages, Playground

OWN = "from logitship import CustomLogitProcessor\n\n\nclass Mine(CustomLogitProcessor):\n    text = 'ü€😀'\n"


def test_draft_is_restored(playground: Playground) -> None:
    page = playground.page
    playground.write(OWN)
    page.fill("#params", '{"a": 1}')
    page.fill("#prompt", "Draft")
    page.fill("#sampling-top_p", "0.5")
    page.check("#mode-raw", force=True)
    playground.open()
    expect(page.locator("#processor")).to_have_value("own")
    expect(page.locator(".cm-content")).to_contain_text("class Mine(")
    expect(page.locator("#params")).to_have_value('{"a": 1}')
    expect(page.locator("#prompt")).to_have_value("Draft")
    expect(page.locator("#sampling-top_p")).to_have_value("0.5")
    expect(page.locator("#mode-raw")).to_be_checked()


def test_edited_example_becomes_own_code(playground: Playground) -> None:
    page = playground.page
    page.locator(".cm-content").click()
    page.keyboard.type("# mine\n")
    expect(page.locator("#processor")).to_have_value("own")
    expect(page.locator("#about")).to_contain_text("Your own class")


def test_link_restores_inputs(playground: Playground, pages: Pages) -> None:
    page = playground.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    playground.write(OWN)
    page.fill("#prompt", "From a link: ü€😀")
    page.click("#share")
    expect(page.locator("#share")).to_have_text("Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.url

    other = pages.new(playground.url)
    other.open(link.removeprefix(playground.url))
    expect(other.page.locator("#prompt")).to_have_value("From a link: ü€😀")
    expect(other.page.locator(".cm-content")).to_contain_text("text = 'ü€😀'")
    # Code from a link does not run until the user presses Run.
    expect(other.page.locator("#with-status")).to_have_text("Not run yet.")


def test_link_without_clipboard(playground: Playground) -> None:
    """Browsers allow clipboard access only on https and localhost."""
    page = playground.page
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    page.click("#share")
    expect(page.locator("#share")).to_have_text("See address bar")
    assert re.search(r"#p=[\w-]+$", page.url)


@pytest.mark.parametrize("link", ["/#p=", "/#p=AAAA", "/#p=%%%", "/#p=q1bKLUkpVbJSUPIIUFTSUVAqKUpNVbJSUCrKT0pVqgUA"])
def test_damaged_link(link: str, pages: Pages, tiny_server: str) -> None:
    playground = pages.new(tiny_server)
    playground.open(link)
    expect(playground.page.locator("#banner")).to_contain_text("The link is damaged")
    expect(playground.page.locator("#processor")).to_have_value("example:lipogram")


@pytest.mark.parametrize("draft", ["", "{", "{}", "[]", '{"mode": "x"}'])
def test_damaged_draft_is_ignored(draft: str, playground: Playground) -> None:
    page = playground.page
    page.evaluate("draft => localStorage.setItem('logitship.playground', draft)", draft)
    playground.open()
    expect(page.locator("#processor")).to_have_value("example:lipogram")


def test_without_storage(pages: Pages, tiny_server: str) -> None:
    playground = pages.new(tiny_server)
    for name in ("localStorage", "sessionStorage"):
        forbid = f"Object.defineProperty(window, '{name}', {{get() {{ throw new Error('forbidden'); }}}})"
        playground.page.add_init_script(forbid)
    playground.open()
    playground.page.click("#theme")
    playground.page.fill("#sampling-max_tokens", "2")
    playground.run()
