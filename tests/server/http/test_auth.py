from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any

import pytest

from logitship.server.api_keys import ApiKeys, Caller
from logitship.server.refusals import SHIPPING_IS_OFF, Forbidden
from tests.helpers.answers import error_of

KEY = "kéyà"  # as UTF-8, it ends with a byte that Latin-1 takes for a space
SHIPPING_KEY = "may ship"
SOURCE = {"source": "class A: ...", "class_name": "A"}
PICKLED = {"callable": "80"}
REGISTERED = {"digest": "sha256:" + "3" * 64}
INSTALLED = {"name": "min_p"}
MESSAGES = [{"role": "user", "content": "a"}]


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.fixture
def locked(make_fake_engine: Any, make_client: Any) -> Any:
    return make_client(make_fake_engine(api_key=KEY))


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", "/v1/models", "/server_info", "/openapi.json", "/nothing", "/health/"]
)
@pytest.mark.parametrize("header", [None, "", KEY, "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_wrong_key(path: str, header: str | None, locked: Any) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = locked.http.get(path, headers=headers)
    assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "Bearer "])
def test_right_key(scheme: str, locked: Any) -> None:
    headers = {"Authorization": f"{scheme} {KEY}".encode()}
    assert locked.http.get("/v1/models", headers=headers).status_code == 200
    answer = locked.http.post("/generate", json={"text": "a"}, headers=headers)
    assert answer.json()["text"] == "Hi!"


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health_generate"])
def test_health_needs_no_key(path: str, locked: Any) -> None:
    assert locked.http.get(path).status_code == 200


def test_no_keys_configured_means_open_access(client: Any) -> None:
    assert client.http.get("/v1/models").status_code == 200


def test_shipping_key_alone_requires_authentication(make_fake_engine: Any, make_client: Any) -> None:
    client = make_client(make_fake_engine(shipping_api_key="s", enable_custom_logit_processor=True))
    assert client.http.post("/generate", json={"text": "a"}).status_code == 401
    assert client.http.post("/generate", json={"text": "a"}, headers=bearer("s")).status_code == 200


# --- who is who ---


def caller(keys: ApiKeys, key: str) -> Caller:
    found = keys.caller(f"Bearer {key}".encode().decode("latin-1"))  # as Starlette reads headers
    assert found is not None
    return found


def test_each_key_is_its_own_tenant() -> None:
    keys = ApiKeys(["a", "b"], ["s", "t"])
    tenants = {key: caller(keys, key).tenant for key in "abst"}
    assert len(set(tenants.values())) == 4
    assert all(len(tenant) == 16 and set(tenant) <= set("0123456789abcdef") for tenant in tenants.values())
    assert caller(ApiKeys(["a"], []), "a").tenant == tenants["a"]  # the same after a restart with other keys
    assert "" not in tenants.values()


def test_who_may_ship() -> None:
    assert [caller(ApiKeys("ab", []), key).may_ship for key in "ab"] == [True, True]
    assert [caller(ApiKeys("ab", "s"), key).may_ship for key in "abs"] == [False, False, True]
    assert [caller(ApiKeys("ab", "bs"), key).may_ship for key in "abs"] == [False, True, True]
    assert ApiKeys([], []).caller("") == Caller("", may_ship=True)


def test_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys = ApiKeys(["first", "a much longer second"], ["third"])
    for presented in ("first", "third", "wrong", "", "w" * 5000):
        compared.clear()
        keys.caller(f"Bearer {presented}")
        assert compared == [(32, 32)] * 3


# --- what a key may ship ---


def tenant_of(key: str) -> str:
    return caller(ApiKeys([key], []), key).tenant


@pytest.fixture
def divided_engine(make_fake_engine: Any) -> Any:
    """Accepts code from some keys only."""
    return make_fake_engine(api_key=KEY, shipping_api_key=SHIPPING_KEY, enable_custom_logit_processor=True)


@pytest.fixture
def post(divided_engine: Any, make_client: Any) -> Callable[..., Any]:
    """Posts a body with an API key."""
    app_client = make_client(divided_engine)

    def send(path: str, body: Any, key: str) -> Any:
        return app_client.http.post(path, json=body, headers=bearer(key))

    return send


def bodies(processor: Any) -> list[tuple[str, Any, str]]:
    """The same processor on every route: path, body, and path of the processor in the body."""
    one = {"custom_logit_processor": processor}
    several = {"logits_processors": [{"processor": INSTALLED}, {"processor": processor}]}
    return [
        ("/generate", {"text": "a", **one}, "custom_logit_processor"),
        ("/generate", {"text": ["a", "b"], "custom_logit_processor": [None, processor]}, "custom_logit_processor[1]"),
        ("/generate", {"text": "a", **several}, "logits_processors[1]"),
        ("/v1/completions", {"prompt": "a", **one}, "custom_logit_processor"),
        ("/v1/completions", {"prompt": ["a", "b"], **several}, "logits_processors[1]"),
        ("/v1/chat/completions", {"messages": MESSAGES, **one}, "custom_logit_processor"),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, **several}, "logits_processors[1]"),
    ]


@pytest.mark.parametrize("processor", [SOURCE, PICKLED])
def test_shipping_requires_a_shipping_key(processor: Any, post: Callable[..., Any], divided_engine: Any) -> None:
    for path, body, at in bodies(processor):
        error = error_of(post(path, body, KEY), 403)
        assert (error["type"], error["param"], error["code"]) == ("permission_error", at, None)
        assert "--shipping-api-key" in error["message"]
        assert not divided_engine.requests
        assert post(path, body, SHIPPING_KEY).status_code == 200
        assert {request.tenant for request in divided_engine.requests} == {tenant_of(SHIPPING_KEY)}
        divided_engine.requests.clear()


@pytest.mark.parametrize("processor", [REGISTERED, INSTALLED])
def test_named_processors_need_no_shipping_key(processor: Any, post: Callable[..., Any], divided_engine: Any) -> None:
    for path, body, _ in bodies(processor):
        assert post(path, body, KEY).status_code == 200
    assert {request.tenant for request in divided_engine.requests} == {tenant_of(KEY)}


@pytest.mark.parametrize("form", [SOURCE, PICKLED, INSTALLED])
def test_registering_requires_a_shipping_key(form: Any, post: Callable[..., Any], divided_engine: Any) -> None:
    assert error_of(post("/v1/processors", form, KEY), 403)["type"] == "permission_error"
    assert not divided_engine.registered
    assert post("/v1/processors", form, SHIPPING_KEY).status_code == 200
    ((_, tenant),) = divided_engine.registered
    assert tenant == tenant_of(SHIPPING_KEY)


def test_every_key_may_ship_without_shipping_keys(make_fake_engine: Any, make_client: Any) -> None:
    engine = make_fake_engine(api_key=(KEY, "another"), enable_custom_logit_processor=True)
    http = make_client(engine).http
    for key in (KEY, "another"):
        for path, body in (("/generate", {"text": "a", "custom_logit_processor": SOURCE}), ("/v1/processors", SOURCE)):
            assert http.post(path, json=body, headers=bearer(key)).status_code == 200
    assert [tenant for _, tenant in engine.registered] == [tenant_of(KEY), tenant_of("another")]


def test_shipping_disabled_takes_precedence_over_keys(make_fake_engine: Any, make_client: Any) -> None:
    http = make_client(make_fake_engine(api_key=KEY)).http
    for path, body in (("/generate", {"text": "a", "custom_logit_processor": SOURCE}), ("/v1/processors", SOURCE)):
        refused = http.post(path, json=body, headers=bearer(KEY))
        assert (refused.status_code, refused.json()["error"]["message"].endswith(SHIPPING_IS_OFF)) == (400, True)


def test_abort_passes_the_tenant(post: Callable[..., Any], divided_engine: Any) -> None:
    for key in (KEY, SHIPPING_KEY):
        assert post("/abort_request", {"rid": "r"}, key).status_code == 200
        assert post("/abort_request", {"abort_all": True}, key).status_code == 200
    mine, other = tenant_of(KEY), tenant_of(SHIPPING_KEY)
    assert divided_engine.aborted == [("r", mine), (None, mine), ("r", other), (None, other)]


def test_processor_not_on_the_allow_list(shipping_client: Any, shipping_engine: Any) -> None:
    """The engine's refusal names the field as the called API does."""
    for path, body, at in bodies(SOURCE):
        if at == "custom_logit_processor[1]":
            continue  # this engine would refuse the first prompt
        place = "processors[1]" if "logits_processors" in body else "processors[0]"
        shipping_engine.refuse_all = Forbidden("the processor sha256:0 is not allowed", param=place)
        error = error_of(shipping_client.post(path, body), 403)
        assert (error["type"], error["param"]) == ("permission_error", at)
        assert error["message"] == f"{at}: the processor sha256:0 is not allowed"
