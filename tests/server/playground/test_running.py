"""Running requests: answers, streaming, stopping and errors."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from .conftest import WAITING_PROCESSOR, Gate, Pages, Playground


def params(page: Page, value: Any) -> None:
    page.fill("#params", json.dumps(value))


def test_answers_are_side_by_side(playground: Playground) -> None:
    page = playground.page
    page.fill("#sampling-max_tokens", "12")
    playground.run()
    without, with_ = page.locator("#without").bounding_box(), page.locator("#with").bounding_box()
    assert without is not None
    assert with_ is not None
    assert without["y"] == with_["y"]
    assert without["x"] + without["width"] <= with_["x"]
    expect(page.locator("#with-title")).to_have_text("With Lipogram")
    expect(playground.tokens("with")).to_have_count(12)
    expect(page.locator("#with-status")).to_have_text(re.compile(r"^12 tokens · \d+ tokens/s · reached max tokens$"))


def test_answers_equal_api_responses(playground: Playground) -> None:
    """Send the same requests to the API, and compare."""
    page = playground.page
    playground.choose("example:uppercase")
    page.fill("#sampling-seed", "5")
    page.fill("#sampling-top_k", "40")
    page.fill("#sampling-max_tokens", "16")
    page.fill("#prompt", "Hello <b>")
    with page.expect_request(lambda request: "custom_logit_processor" in (request.post_data or "")) as sent:
        playground.run()
    body = sent.value.post_data_json
    assert body["custom_logit_processor"]["class_name"] == "Uppercase"
    assert (body["seed"], body["top_k"], body["temperature"]) == (5, 40, 0.7)
    assert body["messages"] == [{"role": "user", "content": "Hello <b>"}]

    without = {key: value for key, value in body.items() if key not in ("custom_logit_processor", "custom_params")}
    for column, request in (("with", body), ("without", without)):
        url = f"{playground.url}/v1/chat/completions"
        (choice,) = httpx.post(url, json=request | {"stream": False}, timeout=60).json()["choices"]
        expect(playground.tokens(column)).to_have_count(len(choice["trace"]))
        assert playground.text(column) == choice["message"]["content"]


def test_receipt(playground: Playground) -> None:
    playground.page.fill("#sampling-max_tokens", "5")
    playground.run()
    receipts = playground.page.locator("#with-receipts li")
    expect(receipts).to_have_count(1)
    expect(receipts).to_contain_text(re.compile(r"Lipogram 5 steps, \d+\.\d ms .*sha256:[0-9a-f]{12}…"))
    expect(playground.page.locator("#without-receipts li")).to_have_count(0)


def test_raw_prompt_uses_completions_route(playground: Playground) -> None:
    page = playground.page
    page.check("#mode-raw", force=True)
    page.fill("#prompt", "raw")
    page.fill("#sampling-max_tokens", "4")
    with page.expect_request("**/v1/completions") as sent:
        playground.run()
    assert sent.value.post_data_json["prompt"] == "raw"
    expect(playground.tokens("without")).to_have_count(4)


def test_random_seed_is_shared(playground: Playground) -> None:
    page = playground.page
    page.fill("#sampling-seed", "")
    seeds: list[int] = []
    page.on("request", lambda request: seeds.append(request.post_data_json["seed"]) if request.post_data else None)
    playground.run()
    assert len(seeds) == 2
    assert seeds[0] == seeds[1]


def test_stop_strings_with_line_feeds(playground: Playground) -> None:
    page = playground.page
    page.fill("#sampling-stop", "END\n\\n\\n")
    with page.expect_request("**/v1/chat/completions") as sent:
        playground.run()
    assert sent.value.post_data_json["stop"] == ["END", "\n\n"]


# --- streaming and stopping ---


def test_tokens_are_streamed(playground: Playground, gate: Gate) -> None:
    page = playground.page
    playground.write(WAITING_PROCESSOR)
    page.fill("#sampling-max_tokens", "9")
    page.click("#run")
    expect(playground.tokens("with")).to_have_count(4)
    assert gate.reached.wait(30)
    expect(page.locator("#with")).to_have_attribute("data-state", "running")
    expect(page.locator("#results")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#run")).to_be_disabled()
    gate.opened.set()
    playground.finish()
    expect(playground.tokens("with")).to_have_count(9)
    expect(page.locator("#results")).to_have_attribute("aria-busy", "false")


def test_stop_cancels_both_requests(playground: Playground, gate: Gate) -> None:
    page = playground.page
    playground.write(WAITING_PROCESSOR)
    page.fill("#sampling-max_tokens", "400")
    page.click("#run")
    expect(playground.tokens("with")).to_have_count(4)
    assert gate.reached.wait(30)
    page.click("#stop")
    for column in ("with", "without"):
        expect(page.locator(f"#{column}")).to_have_attribute("data-state", "stopped")
        expect(page.locator(f"#{column}-status")).to_contain_text("stopped")
    expect(page.locator("#run")).to_be_enabled()
    gate.opened.set()
    running = """async () => {
        const info = await (await fetch("server_info")).json();
        return info.internal_states[0].running === 0;
    }"""
    page.wait_for_function(running)
    expect(playground.tokens("with")).to_have_count(4)


# --- errors ---

RAISES = """from logitship import CustomLogitProcessor


class Raises(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return self.helper(logits)

    def helper(self, logits):
        raise ValueError("<img src=x onerror=alert(1)> it is broken")
"""


def error_lines(page: Page) -> Any:
    return page.locator("#editor .error-line")


def test_fault_is_shown_at_line(playground: Playground) -> None:
    page = playground.page
    playground.write(RAISES)
    playground.run(fails=True)
    expect(error_lines(page)).to_have_text('        raise ValueError("<img src=x onerror=alert(1)> it is broken")')
    expect(page.locator("#editor .cm-lint-marker-error")).to_have_count(1)
    expect(page.locator("#code-error")).to_contain_text("Line 9: processor Raises raised ValueError")
    expect(page.locator("#code-error pre")).to_contain_text("line 9, in helper")
    expect(page.locator("#code-error img")).to_have_count(0)
    expect(page.locator("#with-error")).to_contain_text("raised ValueError: <img")
    expect(page.locator("#announcer")).to_contain_text("With Raises: processor Raises raised ValueError")
    # The other answer is complete, and the next edit removes the error.
    expect(page.locator("#without-error")).to_be_empty()
    page.get_by_role("button", name="Go to line 9").click()
    page.keyboard.press("End")
    page.keyboard.type("  # fixed")
    expect(error_lines(page)).to_have_count(0)
    expect(page.locator("#code-error")).to_be_empty()


def test_syntax_error_is_shown_at_line(playground: Playground) -> None:
    page = playground.page
    playground.write("from logitship import CustomLogitProcessor\n\n\nclass A(CustomLogitProcessor):\nx = = 1\n")
    playground.run(fails=True)
    expect(page.locator("#code-error")).to_contain_text("is not valid Python")
    expect(error_lines(page)).to_have_count(1)
    expect(page.locator("#code-error")).to_contain_text(re.compile("Line [45]:"))
    playground.expect_console_error("400 (Bad Request)")


def test_load_error_is_shown_at_line(playground: Playground) -> None:
    page = playground.page
    playground.write("from logitship import CustomLogitProcessor\n\n1 / 0\n\nclass A(CustomLogitProcessor): ...\n")
    playground.run(fails=True)
    expect(error_lines(page)).to_have_text("1 / 0")
    expect(page.locator("#code-error")).to_contain_text("ZeroDivisionError")
    playground.expect_console_error("400 (Bad Request)")


def test_source_without_class_is_not_sent(playground: Playground) -> None:
    page = playground.page
    playground.write("x = 1")
    page.click("#run")
    expect(page.locator("#code-error")).to_contain_text("defines no class")
    expect(page.locator("#with")).not_to_have_attribute("data-state", "running")


def test_invalid_parameters(playground: Playground) -> None:
    page = playground.page
    for text, message in (('{"letter": }', "This is not JSON"), ("[1]", "Enter a JSON object")):
        page.fill("#params", text)
        expect(page.locator("#params-error")).to_contain_text(message)
        expect(page.locator("#params")).to_have_attribute("aria-invalid", "true")
        page.click("#run")
        expect(page.locator("#banner")).to_have_text("The parameters are not valid JSON.")
        expect(page.locator("#params")).to_be_focused()
    page.fill("#params", '{"letter": "a"}')
    expect(page.locator("#params-error")).to_be_empty()
    playground.run()
    expect(page.locator("#banner")).to_be_hidden()


def test_refused_field_is_marked(playground: Playground) -> None:
    page = playground.page
    playground.expect_console_error("400 (Bad Request)")
    page.fill("#sampling-temperature", "-1")
    page.click("#run")
    expect(page.locator("#sampling-temperature")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#without-error")).to_contain_text("temperature")
    page.fill("#sampling-temperature", "")
    page.click("#run")
    expect(page.locator("#banner")).to_have_text("Temperature must be a number.")
    expect(page.locator("#sampling-temperature")).to_be_focused()


@pytest.mark.parametrize(("name", "value"), [("top_p", "1.5"), ("top_k", "-7"), ("min_p", "-0.5")])
def test_invalid_filter_is_not_left_out(name: str, value: str, playground: Playground) -> None:
    page = playground.page
    playground.expect_console_error("400 (Bad Request)")
    page.fill(f"#sampling-{name}", value)
    page.click("#run")
    expect(page.locator(f"#sampling-{name}")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#with-error")).to_contain_text(name)


def test_unreachable_server(playground: Playground) -> None:
    page = playground.page
    playground.expect_console_error("net::ERR_FAILED")

    def gone(route: Route) -> None:
        route.abort()

    page.route("**/v1/chat/completions", gone)
    page.click("#run")
    for column in ("with", "without"):
        expect(page.locator(f"#{column}-error")).to_contain_text("No response from the server")
    page.unroute("**/v1/chat/completions", gone)
    playground.run()
    expect(page.locator("#with-error")).to_be_empty()


def test_truncated_stream(playground: Playground) -> None:
    """A response without its end is an error."""
    page = playground.page
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="", content_type="text/event-stream"))
    page.click("#run")
    expect(page.locator("#with-error")).to_contain_text("The response was interrupted")
    expect(page.locator("#with")).to_have_attribute("data-state", "failed")


def test_error_response_without_json(playground: Playground) -> None:
    playground.expect_console_error("502 (Bad Gateway)")
    page = playground.page
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="<h1>a proxy's page</h1>"))
    page.click("#run")
    expect(page.locator("#with-error")).to_have_text("<h1>a proxy's page</h1>")


def test_page_in_place_of_json(playground: Playground) -> None:
    page = playground.page
    page.route("**/server_info", lambda route: route.fulfill(body="<h1>Log in</h1>", content_type="text/html"))
    page.reload()
    expect(page.locator("#banner")).to_contain_text("The response is not JSON")


# --- output of models and processors is text, not markup ---

HTML = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def test_forced_html_is_text(playground: Playground) -> None:
    page = playground.page
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    playground.choose("example:template")
    params(page, {"template": HTML})
    page.fill("#sampling-max_tokens", "100")
    playground.run()
    assert playground.text("with").startswith(HTML)
    expect(page.locator("#with-tokens img, #with-tokens script")).to_have_count(0)
    expect(page.locator("#with-tokens .forced")).to_have_count(len(HTML) + 1)
    assert dialogs == []


def test_html_in_names_and_tokens_is_text(playground: Playground) -> None:
    """Another server could send such a response."""
    page = playground.page
    entry = {"token_id": 7, "text": HTML}
    stage = {"logprobs": [-0.1], "num_allowed": 9}
    stages = [{"stage": "model"}, {"stage": "processor", "name": HTML, "digest": HTML}, {"stage": "sampling"}]
    trace = {**entry, "candidates": [entry], "stages": [each | stage for each in stages]}
    receipt = {"name": HTML, "digest": HTML, "steps": 1, "milliseconds": 1.0}
    choice = {"delta": {"content": HTML}, "trace": [trace], "finish_reason": HTML, "receipts": [receipt]}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    playground.run()
    playground.tokens("with").click()
    assert page.locator("#with-tokens").inner_text().strip() == HTML
    expect(page.locator("#with-status")).to_contain_text(HTML)
    expect(page.locator("#with-receipts")).to_contain_text(HTML)
    expect(page.locator("#trace thead")).to_contain_text(HTML)
    expect(page.locator("#results img, #results script")).to_have_count(0)


def test_profiles_are_separate(pages: Pages, tiny_server: str) -> None:
    one, other = pages.new(tiny_server), pages.new(tiny_server)
    one.open()
    one.page.fill("#prompt", "mine")
    other.open()
    expect(other.page.locator("#prompt")).to_have_value("What is the moon?")
    one.open()
    expect(one.page.locator("#prompt")).to_have_value("mine")
