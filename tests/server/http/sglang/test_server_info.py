from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from logitship.server.config import ServerConfig
from logitship.server.http.sglang.server_info import model_info_of, server_info_of, server_info_schema

FakeEngine = Any


def test_settings_without_the_keys(make_fake_engine: Callable[..., FakeEngine]) -> None:
    engine = make_fake_engine(api_key="secret", shipping_api_key="secret", enable_custom_logit_processor=True)
    info = server_info_of(engine)
    secrets = {"api_key", "shipping_api_key", "metrics_api_key", "watermark_key_file"}
    settings = {field.name for field in fields(ServerConfig)}
    assert settings & info.keys() == settings - secrets
    assert "secret" not in repr(info)
    assert info["internal_states"][0]["waiting"] == 2
    assert (info["max_total_num_tokens"], info["page_size"]) == (engine.config.max_num_seqs * 64, 16)


def test_schema_matches_the_response(engine: FakeEngine) -> None:
    schema = server_info_schema()
    assert set(schema["properties"]) == set(server_info_of(engine)) == set(schema["required"])


def test_internal_state_has_all_stats(engine: FakeEngine) -> None:
    (state,) = server_info_of(engine)["internal_states"]
    # Shown to the operator only, in `/metrics`.
    assert state == {name: value for name, value in asdict(engine.stats()).items() if name != "tenant_step_seconds"}


def test_model_info_matches_the_model(engine: FakeEngine) -> None:
    model = model_info_of(engine)
    assert (model["served_model_name"], model["model_path"]) == ("tiny", "/models/tiny")
    assert server_info_of(engine)["dtype"] == model["dtype"] == "float32"
