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
    expect(page.locator("#processor")).to_have_value("example:lipogram")
    expect(page.locator(".cm-content")).to_contain_text("class Mine(")
    expect(page.locator("#params")).to_have_value('{"a": 1}')
    expect(page.locator("#prompt")).to_have_value("Draft")
    expect(page.locator("#sampling-top_p")).to_have_value("0.5")
    expect(page.locator("#mode-raw")).to_be_checked()


def test_edited_example_is_kept_and_can_be_restored(playground: Playground) -> None:
    page = playground.page
    expect(page.locator("#restore")).to_be_hidden()
    page.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+Home")
    page.keyboard.type("# mine\n")
    page.fill("#prompt", "My prompt")
    expect(page.locator("#about")).to_contain_text("Edited")
    playground.choose("example:alliteration")
    expect(page.locator(".cm-content")).not_to_contain_text("# mine")
    playground.choose("example:lipogram")
    expect(page.locator(".cm-content")).to_contain_text("# mine")
    expect(page.locator("#prompt")).to_have_value("My prompt")
    playground.open()
    expect(page.locator(".cm-content")).to_contain_text("# mine")

    page.click("#restore")
    expect(page.locator(".cm-content")).not_to_contain_text("# mine")
    expect(page.locator("#prompt")).not_to_have_value("My prompt")
    expect(page.locator("#restore")).to_be_hidden()
    page.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+z")
    expect(page.locator(".cm-content")).to_contain_text("# mine")
    # Also among the kept drafts.
    assert kept(playground) == [re.compile(r"Lipogram, .+")]


def test_looking_at_examples_edits_none(playground: Playground) -> None:
    for example in ("example:alliteration", "example:lipogram", "example:alliteration"):
        playground.choose(example)
        expect(playground.page.locator("#about")).not_to_contain_text("Edited")
        expect(playground.page.locator("#restore")).to_be_hidden()


def kept(playground: Playground) -> list[re.Pattern[str]]:
    """Return the names of the kept drafts as patterns without the time."""
    texts = playground.page.locator("#kept-drafts option").all_text_contents()
    return [re.compile(text.partition(",")[0] + ", .+") for text in texts]


def test_own_code_survives_looking_at_examples(playground: Playground) -> None:
    page = playground.page
    page.select_option("#processor", "own")
    playground.write(OWN)
    page.fill("#params", '{"a": 1}')
    page.fill("#prompt", "Own prompt")
    playground.choose("example:alliteration")
    playground.choose("named:disallowed_tokens")
    playground.choose("example:template")
    playground.write("from logitship import CustomLogitProcessor\n\n\nclass Other(CustomLogitProcessor): ...\n")
    playground.open()
    expect(page.locator(".cm-content")).to_contain_text("class Other(")
    page.select_option("#processor", "own")
    expect(page.locator(".cm-content")).to_contain_text("class Mine(")
    expect(page.locator("#params")).to_have_value('{"a": 1}')
    expect(page.locator("#prompt")).to_have_value("Own prompt")
    # Each has a history of its own.
    page.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+z")
    expect(page.locator(".cm-content")).not_to_contain_text("class Other(")
    page.select_option("#processor", "example:template")
    expect(page.locator(".cm-content")).to_contain_text("class Other(")


def test_undo_reaches_edits_before_looking_at_an_example(playground: Playground) -> None:
    page = playground.page
    page.select_option("#processor", "own")
    playground.write(OWN)
    page.keyboard.press("ControlOrMeta+End")
    page.keyboard.type("# typed")
    playground.choose("example:alliteration")
    page.select_option("#processor", "own")
    expect(page.locator(".cm-content")).to_contain_text("# typed")
    page.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+z")
    expect(page.locator(".cm-content")).not_to_contain_text("# typed")
    expect(page.locator(".cm-content")).to_contain_text("class Mine(")


def test_a_link_does_not_overwrite_own_code(playground: Playground, pages: Pages) -> None:
    other = pages.new(playground.url)
    other.open()
    other.page.select_option("#processor", "own")
    other.write(OWN.replace("Mine", "Theirs"))
    other.page.click("#share")
    expect(other.page.locator("#share")).not_to_have_text("Copy link")
    link = other.page.url.removeprefix(playground.url)

    page = playground.page
    page.select_option("#processor", "own")
    playground.write(OWN)
    page.goto("about:blank")
    playground.open(link)
    expect(page.locator(".cm-content")).to_contain_text("class Theirs(")
    page.select_option("#processor", label=page.locator("#kept-drafts option").first.text_content())
    expect(page.locator(".cm-content")).to_contain_text("class Mine(")
    page.select_option("#processor", "own")
    expect(page.locator(".cm-content")).to_contain_text("class Theirs(")
    # The link is still in the address bar: a reload shows the edits.
    playground.write(OWN.replace("Mine", "Edited"))
    page.reload()
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator(".cm-content")).to_contain_text("class Edited(")


def test_two_tabs_keep_each_others_code(playground: Playground) -> None:
    page = playground.page
    page.select_option("#processor", "own")
    second = Playground(page.context.new_page(), playground.url)
    second.open()
    second.page.select_option("#processor", "own")
    second.write(OWN.replace("Mine", "Second"))
    playground.write(OWN.replace("Mine", "First"))
    second.open()
    assert re.compile(r"Second, .+") in kept(second)
    expect(second.page.locator(".cm-content")).to_contain_text("class First(")


def test_kept_draft_can_be_deleted(playground: Playground) -> None:
    page = playground.page
    playground.write(OWN)
    page.click("#restore")
    page.select_option("#processor", label=page.locator("#kept-drafts option").first.text_content())
    expect(page.locator(".cm-content")).to_contain_text("class Mine(")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("#delete-draft")
    assert len(kept(playground)) == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete-draft")
    expect(page.locator("#kept-drafts option")).to_have_count(0)
    expect(page.locator("#delete-draft")).to_be_hidden()


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
