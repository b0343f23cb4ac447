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
@pytest.mark.parametrize("field", ["api_key", "shipping_api_key"])
def test_keys_become_a_tuple(field: str, given: Any, kept: tuple[str, ...]) -> None:
    config = ServerConfig(**{field: given}, **SHIPPING)  # type: ignore[arg-type]
    assert getattr(config, field) == kept
    assert getattr(dataclasses.replace(config, port=1), field) == kept


@pytest.mark.parametrize("key", ["", " ", "secret ", "\tsecret", ("fine", "")])
@pytest.mark.parametrize("field", ["api_key", "shipping_api_key"])
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
    shown = repr(ServerConfig(api_key="secret", shipping_api_key=("secret", "secrets"), **SHIPPING))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("field", ["sandbox_cpu_time", "sandbox_step_timeout", "sandbox_load_timeout"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_sandbox_timeouts_are_positive_and_finite(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be above 0 and finite"):
        ServerConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["max_sandboxes", "sandbox_memory"])
def test_sandbox_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be 1 or greater"):
        ServerConfig(**{field: 0})  # type: ignore[arg-type]


def test_sandboxes_are_the_default() -> None:
    config = ServerConfig()
    assert config.processor_isolation == "sandbox"
    assert (config.max_sandboxes, config.sandbox_memory) == (64, 1 << 30)
    assert (config.sandbox_cpu_time, config.sandbox_step_timeout, config.sandbox_load_timeout) == (2.0, 1.0, 10.0)


def test_slots_are_reserved_where_there_are_several_keys() -> None:
    assert ServerConfig(max_num_seqs=32).reserved_slots == 0
    assert ServerConfig(max_num_seqs=32, api_key="a").reserved_slots == 0
    assert ServerConfig(max_num_seqs=32, api_key=("a", "b")).reserved_slots == 4
    assert ServerConfig(max_num_seqs=4, api_key=("a", "b")).reserved_slots == 0
    assert ServerConfig(max_queued_requests=100, api_key=("a", "b")).reserved_queue_places == 25
    assert ServerConfig(max_queued_requests=100, api_key="a").reserved_queue_places == 0


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_tenant_step_share_is_a_fraction(share: float) -> None:
    with pytest.raises(ValueError, match="tenant_step_share"):
        ServerConfig(tenant_step_share=share)
