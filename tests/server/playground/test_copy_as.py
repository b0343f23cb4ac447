"""Programs of "Copy as", run as they are; and the button Register."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from .conftest import Playground


def copied(playground: Playground, language: str) -> str:
    """Return the program in a language, as the button copies it."""
    page = playground.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-as")
    page.click(f"label[for=format-{language}]")
    page.click("#program-copy")
    expect(page.locator("#program-copy")).to_have_text("Copied")
    page.click("#program-close")
    text = page.evaluate("navigator.clipboard.readText()")
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("mode", ["chat", "raw"])
def test_programs_give_the_answer_of_the_page(mode: str, playground: Playground, tmp_path: Path) -> None:
    page = playground.page
    playground.choose("example:uppercase")
    page.check(f"#mode-{mode}", force=True)
    page.fill("#prompt", 'It\'s "quoted" \\ ü€😀 $HOME `date`')
    page.fill("#sampling-max_tokens", "8")
    page.fill("#sampling-top_k", "40")
    page.fill("#sampling-stop", "zzz")
    playground.run()
    answer = playground.text("with")
    for language in ("python", "openai"):
        (tmp_path / f"ask_{language}.py").write_text(copied(playground, language))
        printed = subprocess.run(
            [sys.executable, f"ask_{language}.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert printed.stdout == f"{answer}\n", printed.stderr
        assert playground.text("with") == answer
    printed = subprocess.run(["bash", "-c", copied(playground, "curl")], capture_output=True, text=True, check=True)
    (choice,) = httpx.Response(200, text=printed.stdout).json()["choices"]
    assert (choice["message"]["content"] if mode == "chat" else choice["text"]) == answer
    assert choice["receipts"][0]["name"] == "Uppercase"


def test_program_of_a_named_processor(playground: Playground, tmp_path: Path) -> None:
    playground.choose("named:disallowed_tokens")
    playground.page.fill("#params", '{"token_ids": [5], "x": [true, null]}')
    text = copied(playground, "python")
    assert 'processor="disallowed_tokens"' in text
    assert 'params={"token_ids": [5], "x": [True, None]}' in text
    assert '"custom_logit_processor": {"name": "disallowed_tokens"}' in copied(playground, "openai")


def test_api_key_is_not_copied(playground: Playground, tmp_path: Path) -> None:
    page = playground.page
    page.click("#key-open")
    page.fill("#key", "secret-key")
    page.get_by_role("button", name="Use this key").click()
    playground.write(f"from __future__ import annotations\n\n{REGISTERED}")
    for language in ("python", "openai", "curl"):
        text = copied(playground, language)
        assert "secret-key" not in text
        assert "LOGITSHIP_API_KEY" in text
        if language == "curl":
            assert text.startswith(f"curl '{playground.url}/v1/")
        else:
            compile(text, language, "exec")


def test_invalid_parameters_are_not_copied(playground: Playground) -> None:
    playground.page.fill("#params", "{")
    playground.page.click("#copy-as")
    expect(playground.page.locator("#banner")).to_be_visible()
    expect(playground.page.locator("#program-dialog")).to_be_hidden()


REGISTERED = """from logitship import CustomLogitProcessor


class OfThePage(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        logits[:, 70] = 1e9
        return logits
"""


def test_register(playground: Playground) -> None:
    page = playground.page
    playground.write(REGISTERED)
    page.click("#register")
    expect(page.locator("#registered")).to_contain_text("Registered as OfThePage@1")
    expect(page.locator(".cm-content")).to_contain_text("class OfThePage(")
    page.fill("#sampling-max_tokens", "3")
    playground.run()
    answer = playground.text("with")
    page.select_option("#processor", "named:OfThePage@1")
    expect(page.locator("#register")).to_be_hidden()
    playground.run()
    assert playground.text("with") == answer
    assert httpx.delete(f"{playground.url}/v1/processors/OfThePage").status_code == 200


def test_class_that_cannot_be_registered(playground: Playground) -> None:
    page = playground.page
    playground.write("from logitship import CustomLogitProcessor\n\n1 / 0\n\nclass A(CustomLogitProcessor): ...\n")
    page.click("#register")
    expect(page.locator("#editor .error-line")).to_have_text("1 / 0")
    expect(page.locator("#registered")).to_be_empty()
    playground.expect_console_error("400 (Bad Request)")
