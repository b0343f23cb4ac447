"""Tokens, their marks, and their traces."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from .conftest import Playground


def traced(playground: Playground) -> list[dict[str, Any]]:
    """Run the page, and return the traces of the same request to the API."""
    page = playground.page
    with page.expect_request(lambda request: "custom_logit_processor" in (request.post_data or "")) as sent:
        playground.run()
    body = sent.value.post_data_json | {"stream": False}
    answer = httpx.post(f"{playground.url}/v1/chat/completions", json=body, timeout=60).json()
    traces: list[dict[str, Any]] = answer["choices"][0]["trace"]
    return traces


def percent(logprob: float | None) -> str:
    """Format a probability as the page does."""
    value = 0.0 if logprob is None else math.exp(logprob) * 100
    if 0 < value < 0.1:
        return "<0.1 %"
    return f"{value:.1f} %" if 0 < value < 99.95 else f"{value:.0f} %"


def test_bars_show_api_values(playground: Playground) -> None:
    page = playground.page
    page.fill("#sampling-max_tokens", "6")
    page.fill("#sampling-temperature", "0.7")
    page.fill("#sampling-top_k", "3")
    traces = traced(playground)
    for index, trace in enumerate(traces):
        playground.tokens("with").nth(index).click()
        more = page.get_by_role("button", name="more")
        if more.count():
            more.click()
        rows = page.locator("#trace tbody tr")
        expect(rows).to_have_count(len(trace["candidates"]))
        # The request's own parameters changed nothing, so that stage is not shown.
        stages = [stage for stage in trace["stages"] if stage["stage"] != "request"]
        for position, stage in enumerate(stages):
            shown = page.locator(f"#trace td:nth-of-type({position + 1})").all_text_contents()
            for text, logprob in zip(shown, stage["logprobs"], strict=True):
                assert text == percent(logprob) if logprob is not None else text in ("forbidden", "filtered", "—")
            bars = page.locator(f"#trace td:nth-of-type({position + 1}) .bar")
            shares = bars.evaluate_all("bars => bars.map((bar) => Number(bar.style.getPropertyValue('--share')))")
            expected = [math.exp(logprob) for logprob in stage["logprobs"] if logprob is not None]
            assert shares == pytest.approx(expected, abs=1e-4)
        ids = rows.evaluate_all("rows => rows.map((row) => Number(row.dataset.tokenId))")
        assert ids == [candidate["token_id"] for candidate in trace["candidates"]]
        sampled = page.locator("#trace tr.sampled")
        expect(sampled).to_have_attribute("data-token-id", str(trace["token_id"]))
        expect(sampled).to_contain_text("sampled")
        allowed = page.locator("#trace .allowed").all_text_contents()
        assert allowed == [
            "1 token left" if stage["num_allowed"] == 1 else f"{stage['num_allowed']:,} tokens" for stage in stages
        ]


def test_request_stage_is_shown_if_it_changed_logits(playground: Playground) -> None:
    page = playground.page
    page.fill("#sampling-max_tokens", "2")

    def with_bias(route: Any) -> None:
        body = route.request.post_data_json | {"logit_bias": {"70": 5}}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", with_bias)
    playground.run()
    playground.tokens("with").first.click()
    assert page.locator("#trace .stage").all_text_contents() == ["Model", "Request", "Lipogram", "Sampling"]


def test_forbidden_and_forced_labels(playground: Playground) -> None:
    page = playground.page
    playground.choose("example:template")
    page.fill("#params", '{"template": "#z"}')
    playground.run()
    first, second = playground.tokens("with").nth(0), playground.tokens("with").nth(1)
    first.click()
    expect(page.locator("#trace .summary")).to_contain_text("were forbidden")
    expect(page.locator("#trace td.processor", has_text="forbidden").first).to_be_visible()
    barred = page.locator("#trace tr.barred .chip").first
    assert "line-through" in barred.evaluate("chip => getComputedStyle(chip).textDecorationLine")
    second.click()
    expect(page.locator("#trace .summary")).to_contain_text("Forced: only “z” was left.")
    expect(page.locator("#trace tr.sampled td.processor")).to_have_text("forced")
    expect(second).to_have_class("token forced")
    expect(second).to_have_attribute("aria-label", "z, token 2, forced")


def test_marks_of_changed_tokens(playground: Playground) -> None:
    """The second choice forbids the most likely token each time; a constant temperature of 1 changes nothing."""
    page = playground.page
    playground.choose("example:second_choice")
    page.fill("#sampling-max_tokens", "5")
    playground.run()
    expect(page.locator("#with-tokens .token.forbidden")).to_have_count(5)
    playground.choose("example:cooling")
    page.fill("#params", '{"start": 1, "end": 1, "steps": 4}')
    page.fill("#sampling-max_tokens", "5")
    playground.run()
    expect(page.locator("#with-tokens .token.none")).to_have_count(5)
    expect(page.locator("#results .columns .differs")).to_have_count(0)
    playground.tokens("with").first.click()
    expect(page.locator("#trace .summary")).to_contain_text("The first choice stayed")


def test_first_difference_is_marked(playground: Playground) -> None:
    page = playground.page
    playground.write(
        "from logitship import CustomLogitProcessor\n\n\n"
        "class Third(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        if len(custom_param_list[0]['__req__'].output_ids) == 2:\n"
        "            logits.scatter_(1, logits.argmax(dim=-1, keepdim=True), -float('inf'))\n"
        "        return logits\n"
    )
    page.fill("#sampling-temperature", "0")
    page.fill("#sampling-max_tokens", "6")
    playground.run()
    for column in ("with", "without"):
        expect(page.locator(f"#{column}-tokens .differs")).to_have_count(1)
        third = playground.tokens(column).nth(2)
        expect(third).to_have_class(re.compile(r"\bdiffers\b"))
        expect(third).to_have_attribute("aria-label", re.compile("token 3.*, first difference$"))


def test_invisible_tokens_have_a_mark(playground: Playground) -> None:
    page = playground.page
    playground.choose("example:template")
    page.fill("#params", '{"template": "a b"}')
    playground.run()
    space = playground.tokens("with").nth(1)
    expect(space).to_have_attribute("aria-label", "space, token 2, forced")
    assert "␣" in space.locator(".ink").evaluate("ink => getComputedStyle(ink, '::before').content")
    end = playground.tokens("with").last
    expect(end).to_have_text("</s>")
    expect(end).to_have_class("token forced unseen")
    space.click()
    expect(page.locator("#trace h2 .chip")).to_have_text("␣")


def test_characters_of_several_tokens(playground: Playground) -> None:
    """The token that completes a character gets its text."""
    playground.write(
        "import torch\nfrom logitship import CustomLogitProcessor\n\n\n"
        "class Euro(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        request = custom_param_list[0]['__req__']\n"
        "        ids = [*request.tokenizer.encode('€', add_special_tokens=False), request.tokenizer.eos_token_id]\n"
        "        left = torch.full_like(logits, -torch.inf)\n"
        "        left[:, ids[len(request.output_ids)]] = 0.0\n"
        "        return left\n"
    )
    playground.run()
    expect(playground.tokens("with")).to_have_count(4)
    assert playground.text("with") == "€"


# --- keyboard ---


def test_keyboard_navigation(playground: Playground) -> None:
    page = playground.page
    keyboard = page.keyboard
    page.fill("#sampling-max_tokens", "5")
    page.focus("#prompt")
    keyboard.type(" And why?")
    keyboard.press("ControlOrMeta+Enter")
    playground.finish()
    page.focus("#run")
    keyboard.press("Tab")  # Stop is disabled now
    expect(playground.tokens("without").first).to_be_focused()
    keyboard.press("Tab")  # one tab stop per column
    expect(playground.tokens("with").first).to_be_focused()
    keyboard.press("ArrowRight")
    keyboard.press("ArrowRight")
    keyboard.press("ArrowLeft")
    expect(playground.tokens("with").nth(1)).to_be_focused()
    expect(page.locator("#trace")).to_be_hidden()
    keyboard.press("Enter")
    expect(page.locator("#trace-title")).to_contain_text("token 2 of 5")
    expect(playground.tokens("with").nth(1)).to_have_attribute("aria-selected", "true")
    expect(page.locator("#announcer")).to_contain_text("irst choice")
    keyboard.press("End")
    keyboard.press("Space")
    expect(page.locator("#trace-title")).to_contain_text("token 5 of 5")
    expect(page.get_by_role("button", name="Next token")).to_be_disabled()
    page.get_by_role("button", name="Previous token").focus()
    keyboard.press("Enter")
    expect(page.locator("#trace-title")).to_contain_text("token 4 of 5")
    expect(page.get_by_role("button", name="Previous token")).to_be_focused()
    keyboard.press("Home")
    page.focus("#with-tokens [tabindex='0']")
    keyboard.press("Home")
    keyboard.press("Enter")
    expect(page.locator("#trace-title")).to_contain_text("token 1 of 5")
    expect(page.locator("[aria-selected=true]")).to_have_count(1)


def test_leaving_editor_by_keyboard(playground: Playground) -> None:
    page = playground.page
    page.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+Home")
    page.keyboard.press("Tab")
    expect(page.locator(".cm-line").first).to_have_text("    import torch")
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    expect(page.locator("#params")).to_be_focused()
    page.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+Enter")
    expect(page.locator("#with")).to_have_attribute("data-state", "failed")  # the indentation
    playground.expect_console_error("400 (Bad Request)")
