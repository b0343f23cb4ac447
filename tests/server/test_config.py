from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from logitship.server.config import ServerConfig

DIGEST = "sha256:" + "a" * 64
SHIPPING = {"enable_custom_logit_processor": True}


@pytest.mark.parametrize(
    ("given", "kept"),
    [("one", ("one",)), (("one",), ("one",)), (["one", "two"], ("one", "two")), ((), ())],
)
@pytest.mark.parametrize("field", ["api_key", "shipping_api_key", "metrics_api_key"])
def test_keys_become_a_tuple(field: str, given: Any, kept: tuple[str, ...]) -> None:
    config = ServerConfig(**{field: given}, **SHIPPING)  # type: ignore[arg-type]
    assert getattr(config, field) == kept
    assert getattr(dataclasses.replace(config, port=1), field) == kept


@pytest.mark.parametrize("key", ["", " ", "secret ", "\tsecret", ("fine", "")])
@pytest.mark.parametrize("field", ["api_key", "shipping_api_key", "metrics_api_key"])
def test_untransmittable_key(field: str, key: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: a key is empty") as refused:
        ServerConfig(**{field: key}, **SHIPPING)
    assert "secret" not in str(refused.value)


def test_trees_by_name() -> None:
    config = ServerConfig(tree="cities=a=b.json")
    assert (config.tree, config.named_trees) == (("cities=a=b.json",), {"cities": "a=b.json"})
    assert ServerConfig(tree=["a=1", "b=2"]).named_trees == {"a": "1", "b": "2"}
    with pytest.raises(ValueError, match=r"^tree: two trees are named 'a'$"):
        ServerConfig(tree=["a=1", "a=1"])
    with pytest.raises(ValueError, match=r"^tree: expected NAME=FILE, got 'a\.json'$"):
        ServerConfig(tree="a.json")


def test_repr_hides_keys() -> None:
    keys = {"api_key": "secret", "shipping_api_key": ("secret", "secrets"), "metrics_api_key": "secret"}
    shown = repr(ServerConfig(**keys, **SHIPPING))  # type: ignore[arg-type]
    assert "secret" not in shown
    assert "port=30000" in shown


def test_shipping_keys_require_shipping() -> None:
    with pytest.raises(ValueError, match=r"shipping_api_key: .*set enable_custom_logit_processor"):
        ServerConfig(shipping_api_key="secret")


def test_allowed_digests_are_read_once_at_construction(tmp_path: Path) -> None:
    assert ServerConfig().allowed_digests is None
    file = tmp_path / "allowed"
    file.write_text(DIGEST)
    config = ServerConfig(allow_processor=str(file))
    file.unlink()
    assert config.allowed_digests == {DIGEST}
    with pytest.raises(ValueError, match=r"allow_processor: .*allowed cannot be read"):
        ServerConfig(allow_processor=str(file))
    file.write_text("nonsense")
    with pytest.raises(ValueError, match="line 1: 'nonsense' is not"):
        dataclasses.replace(config, port=1)


@pytest.mark.parametrize(
    "field", ["sandbox_cpu_time", "sandbox_step_timeout", "sandbox_first_step_timeout", "sandbox_load_timeout"]
)
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_sandbox_timeouts_are_positive_and_finite(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be above 0 and finite"):
        ServerConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["max_sandboxes", "sandbox_memory"])
def test_sandbox_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be 1 or greater"):
        ServerConfig(**{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("logprobs_mode", "raw_logits", "raw_logprobs, processed_logprobs"),
        ("speculative_algorithm", "EAGLE", "NGRAM"),
        ("processor_isolation", "Sandbox", "sandbox, none"),
        ("processor_isolation", None, "sandbox, none"),
        ("log_format", "xml", "text, json"),
    ],
)
def test_settings_with_few_values(field: str, value: Any, choices: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be one of {choices}, not {value!r}$"):
        ServerConfig(**{field: value})  # type: ignore[arg-type]


def test_share_of_queued_bytes() -> None:
    assert ServerConfig(max_queued_bytes=1 << 28).max_queued_bytes_per_tenant == 1 << 28
    assert ServerConfig(max_queued_bytes=1 << 28, api_key="one").max_queued_bytes_per_tenant == 1 << 28
    assert ServerConfig(max_queued_bytes=1 << 28, api_key=("one", "two")).max_queued_bytes_per_tenant == 1 << 27
    assert ServerConfig(max_num_seqs=3, max_queued_requests=4).max_sequences_per_tenant == 7
    assert ServerConfig(max_num_seqs=3, max_queued_requests=4, api_key=("a", "b")).max_sequences_per_tenant == 4
    with pytest.raises(ValueError, match="max_queued_bytes must be enough for one request body"):
        ServerConfig(max_queued_bytes=1 << 24, api_key=("one", "two"))


def test_sandboxes_are_the_default() -> None:
    config = ServerConfig()
    assert config.processor_isolation == "sandbox"
    assert (config.max_sandboxes, config.sandbox_memory) == (64, 1 << 30)
    assert (config.sandbox_cpu_time, config.sandbox_step_timeout, config.sandbox_load_timeout) == (2.0, 1.0, 10.0)
    assert config.sandbox_first_step_timeout == 10.0


@pytest.mark.parametrize(
    ("opened", "flag"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0"),
        ({"host": "::"}, "--host ::"),
        ({"host": "llm.example.org"}, "--host llm.example.org"),
        ({"allowed_origin": "*"}, r"--allowed-origin \*"),
        ({"allowed_host": ("a", "*")}, r"--allowed-host \*"),
    ],
)
def test_anonymous_code(opened: dict[str, Any], flag: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^enable_custom_logit_processor: {flag} .*--api-key.*--allow-anonymous-code$"
    ):
        ServerConfig(**SHIPPING, **opened)
    ServerConfig(**SHIPPING, **opened, allow_anonymous_code=True)
    ServerConfig(**opened)
    for isolation in ("sandbox", "none"):
        ServerConfig(**SHIPPING, **opened, processor_isolation=isolation, api_key="k")
        ServerConfig(**SHIPPING, **opened, processor_isolation=isolation, shipping_api_key="k")
    with pytest.raises(ValueError, match=rf"^processor_isolation none: {flag} .*--api-key"):
        ServerConfig(**SHIPPING, **opened, processor_isolation="none", allow_anonymous_code=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("isolation", ["sandbox", "none"])
def test_local_code_needs_no_key(host: str, isolation: Any) -> None:
    allowed = {"allowed_origin": ("https://app.example.org",), "allowed_host": ("*.example.org",)}
    ServerConfig(enable_custom_logit_processor=True, host=host, processor_isolation=isolation, **allowed)


def test_one_allowed_host_or_origin() -> None:
    config = ServerConfig(allowed_host="a.example.org", allowed_origin="https://a.example.org")
    assert (config.allowed_host, config.allowed_origin) == (("a.example.org",), ("https://a.example.org",))


@pytest.mark.parametrize("field", ["allowed_host", "allowed_origin"])
def test_malformed_hosts_and_origins(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        ServerConfig(**{field: "https://a.example.org/path"})  # type: ignore[arg-type]


def test_slots_are_reserved_where_there_are_several_keys() -> None:
    assert ServerConfig(max_num_seqs=32).reserved_slots == 0
    assert ServerConfig(max_num_seqs=32, api_key="a").reserved_slots == 0
    assert ServerConfig(max_num_seqs=32, api_key=("a", "b")).reserved_slots == 4
    assert ServerConfig(max_num_seqs=4, api_key=("a", "b")).reserved_slots == 0


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_tenant_step_share_is_a_fraction(share: float) -> None:
    with pytest.raises(ValueError, match="tenant_step_share"):
        ServerConfig(tenant_step_share=share)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({}, True),
        ({"api_key": "a"}, True),
        ({"api_key": "a", "shipping_api_key": "a"}, True),
        ({"api_key": ("a", "b")}, False),
        ({"api_key": "a", "shipping_api_key": "b"}, False),
        ({"api_key": ("a", "b"), "metrics_api_key": "m"}, True),
    ],
)
def test_names_in_metrics(keys: dict[str, Any], names: bool) -> None:
    assert ServerConfig(**SHIPPING, **keys).names_in_metrics is names


@pytest.mark.parametrize(
    ("pattern", "says"), [("(", "not a regular expression"), ("(?=a)", "not a regular expression .*: look-around")]
)
def test_pattern_of_white_space(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^constrained_json_whitespace_pattern: {says}"):
        ServerConfig(constrained_json_whitespace_pattern=pattern)
