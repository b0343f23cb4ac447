"""The page on servers with API keys, without shipped code, without the page, and behind a proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import httpx
import pytest
from playwright.sync_api import expect

from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.http_server import running_server
from logitship.server.model.model_loader import LoadedModel

from .conftest import Pages, Playground

KEY = "the kéy €"


class Serve(Protocol):
    def __call__(self, **settings: Any) -> AbstractContextManager[str]: ...


@pytest.fixture
def serve(loaded_model: LoadedModel) -> Serve:
    """Start a server on the tiny model."""

    def serve(**settings: Any) -> AbstractContextManager[str]:
        defaults = {"port": 0, "max_num_seqs": 4, "processor_isolation": "none", "log_level": "error"}
        config = ServerConfig(model_path="tiny", **(defaults | settings))
        return running_server(config, build_engine(config, loaded_model))

    return serve


@pytest.fixture
def locked(serve: Serve) -> Iterator[str]:
    """Base URL of a server that requires a key."""
    with serve(api_key=KEY, enable_custom_logit_processor=True) as url:
        yield url


def type_key(playground: Playground, key: str) -> None:
    playground.page.fill("#key", key)
    playground.page.keyboard.press("Enter")


def test_page_asks_for_key(locked: str, pages: Pages) -> None:
    playground = pages.new(locked)
    playground.expect_console_error("401 (Unauthorized)")
    page = playground.page
    page.goto(locked)
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key")).to_be_focused()
    type_key(playground, "a wrong one")
    expect(page.locator("#key-error")).to_contain_text("the API key is missing or wrong")
    type_key(playground, KEY)
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#run")).to_be_enabled()
    page.fill("#sampling-max_tokens", "3")
    playground.run()
    # The key is stored in this tab only.
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")
    page.click("#share")
    assert KEY not in page.url
    playground.open("/")
    expect(page.locator("#key-dialog")).to_be_hidden()


def test_key_without_storage(locked: str, pages: Pages) -> None:
    playground = pages.new(locked)
    playground.expect_console_error("401 (Unauthorized)")
    playground.page.add_init_script(
        "Object.defineProperty(window, 'sessionStorage', {get() { throw new Error('forbidden'); }})"
    )
    playground.page.goto(locked)
    type_key(playground, KEY)
    expect(playground.page.locator("#run")).to_be_enabled()
    playground.page.fill("#sampling-max_tokens", "3")
    playground.run()


def test_outdated_key(locked: str, pages: Pages) -> None:
    playground = pages.new(locked)
    playground.expect_console_error("401 (Unauthorized)")
    page = playground.page
    page.goto(locked)
    type_key(playground, KEY)
    expect(page.locator("#run")).to_be_enabled()
    page.evaluate("sessionStorage.setItem('logitship.api-key', 'old')")
    page.click("#run")
    expect(page.locator("#key-dialog")).to_be_visible()
    expect(page.locator("#key-error")).to_contain_text("missing or wrong")
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()


def test_key_without_shipping_permission(serve: Serve, pages: Pages) -> None:
    with serve(api_key=KEY, shipping_api_key="ships", enable_custom_logit_processor=True) as url:
        playground = pages.new(url)
        playground.expect_console_error("401 (Unauthorized)")
        playground.expect_console_error("403 (Forbidden)")
        playground.page.goto(url)
        type_key(playground, KEY)
        expect(playground.page.locator("#run")).to_be_enabled()
        playground.run(fails=True)
        expect(playground.page.locator("#with-error")).to_contain_text("--shipping-api-key")


def test_server_without_shipped_code(serve: Serve, pages: Pages) -> None:
    with serve() as url:
        playground = pages.new(url)
        playground.open()
        page = playground.page
        expect(page.locator("#notice")).to_contain_text("logitship serve --enable-custom-logit-processor")
        expect(page.locator("#processor option[value='own']")).to_be_disabled()
        expect(page.locator("#code")).to_be_hidden()
        page.select_option("#processor", "named:disallowed_tokens")
        expect(page.locator("#about")).to_contain_text("Tokens that must not be sampled")
        page.fill("#params", '{"token_ids": [72, 73]}')
        page.fill("#sampling-max_tokens", "4")
        playground.run()
        expect(page.locator("#with-title")).to_have_text("With disallowed_tokens")
        expect(page.locator("#with-receipts")).to_contain_text("4 steps")
        expect(page.locator("#notice")).to_be_visible()


def test_installed_processors_have_initial_params(playground: Playground) -> None:
    page = playground.page
    processors = httpx.get(f"{playground.url}/v1/processors").json()["data"]
    for processor in processors:
        page.select_option("#processor", f"named:{processor['id']}")
        required = (processor["params_schema"] or {}).get("required", [])
        assert set(json.loads(page.input_value("#params"))) == set(required)
        expect(page.locator("#params-error")).to_be_empty()


def test_registered_processors_are_listed(playground: Playground) -> None:
    source = (
        "from logitship import CustomLogitProcessor\n\n\n"
        "class OfThePlayground(CustomLogitProcessor):\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        return logits\n"
    )
    body = {"source": source, "class_name": "OfThePlayground"}
    registered = httpx.post(f"{playground.url}/v1/processors", json=body, timeout=60).json()
    playground.open()
    playground.page.select_option("#processor", f"named:{registered['id']}")
    playground.page.fill("#sampling-max_tokens", "3")
    playground.run()
    expect(playground.page.locator("#with-receipts")).to_contain_text("OfThePlayground 3 steps")


def test_disable_playground(serve: Serve) -> None:
    with serve(disable_playground=True) as url:
        assert httpx.get(url).status_code == 404
        assert httpx.get(f"{url}/playground/main.js").status_code == 404
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_page_below_prefix(serve: Serve, pages: Pages) -> None:
    """Serve the page below a prefix, as a proxy does: all its URLs are relative."""
    with serve(enable_custom_logit_processor=True) as url:
        playground = pages.new(url)

        def proxy(route: Any) -> None:
            answer = route.fetch(url=route.request.url.replace("/llm/", "/"))
            route.fulfill(response=answer)

        playground.page.route("**/llm/**", proxy)
        playground.open("/llm/")
        playground.page.fill("#sampling-max_tokens", "3")
        playground.run()
