from __future__ import annotations

from pathlib import Path

import pytest

from logitship.builtin_processors import WatermarkKey
from logitship.server.config import ServerConfig
from logitship.server.vllm.settings import VllmSettings


def test_defaults_accept_no_code() -> None:
    settings = VllmSettings.from_environment({"PATH": "/bin", "VLLM_HOST_IP": "::1"})
    assert settings == VllmSettings()
    assert not settings.enable_custom_logit_processor
    assert settings.processor_isolation == "sandbox"


def test_defaults_agree_with_the_server_and_the_sandbox() -> None:
    server, plugin = ServerConfig(), VllmSettings()
    for name in (
        "allow_processor",
        "enable_custom_logit_processor",
        "max_processor_size",
        "max_sandboxes",
        "processor_isolation",
        "sandbox_cpu_time",
        "sandbox_memory",
        "sandbox_step_timeout",
        "sandbox_first_step_timeout",
    ):
        assert getattr(plugin, name) == getattr(server, name), name


def test_every_variable_is_read(tmp_path: Path) -> None:
    digest = f"sha256:{'a' * 64}"
    (tmp_path / "allowed").write_text(digest)
    (tmp_path / "key").write_text("a secret of the tests")
    settings = VllmSettings.from_environment(
        {
            "LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR": "True",
            "LOGITSHIP_VLLM_PROCESSOR_ISOLATION": "none",
            "LOGITSHIP_VLLM_MAX_PROCESSOR_SIZE": "1000",
            "LOGITSHIP_VLLM_MAX_SANDBOXES": "3",
            "LOGITSHIP_VLLM_SANDBOX_MEMORY": "1048576",
            "LOGITSHIP_VLLM_SANDBOX_CPU_TIME": "1.5",
            "LOGITSHIP_VLLM_SANDBOX_STEP_TIMEOUT": "0.25",
            "LOGITSHIP_VLLM_SANDBOX_FIRST_STEP_TIMEOUT": "3",
            "LOGITSHIP_VLLM_SANDBOX_LOAD_TIMEOUT": " 2 ",
            "LOGITSHIP_VLLM_ALLOW_PROCESSOR": str(tmp_path / "allowed"),
            "LOGITSHIP_VLLM_DEFAULT_PROCESSOR": 'disallowed_tokens={"token_ids": [1]}\n\nwatermark_kgw\n',
            "LOGITSHIP_VLLM_WATERMARK_KEY_FILE": str(tmp_path / "key"),
            "LOGITSHIP_VLLM_TREE": "a=/x.json, b=/y=z.json",
            "LOGITSHIP_VLLM_TENANT_HEADER": "x-tenant",
            "LOGITSHIP_VLLM_NUM_TENANTS": "3",
        }
    )
    assert settings == VllmSettings(
        enable_custom_logit_processor=True,
        processor_isolation="none",
        max_processor_size=1000,
        max_sandboxes=3,
        sandbox_memory=1 << 20,
        sandbox_cpu_time=1.5,
        sandbox_step_timeout=0.25,
        sandbox_first_step_timeout=3.0,
        sandbox_load_timeout=2.0,
        allow_processor=str(tmp_path / "allowed"),
        default_processor=('disallowed_tokens={"token_ids": [1]}', "watermark_kgw"),
        watermark_key_file=str(tmp_path / "key"),
        tree={"a": "/x.json", "b": "/y=z.json"},
        tenant_header="x-tenant",
        num_tenants=3,
    )
    assert settings.allowed_digests == {digest}
    assert settings.watermark_key == WatermarkKey(b"a secret of the tests")
    assert [each.name for each in settings.default_processors] == ["disallowed_tokens", "watermark_kgw"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ENABLE_CUSTOM_LOGIT_PROCESSOR", "yes please", "must be 1 "),
        ("PROCESSOR_ISOLATION", "container", "must be sandbox or none"),
        ("MAX_SANDBOXES", "0", "1 or greater"),
        ("MAX_SANDBOXES", "-1", "1 or greater"),
        ("SANDBOX_STEP_TIMEOUT", "nan", "above 0"),
        ("SANDBOX_STEP_TIMEOUT", "soon", "above 0"),
        ("SANDBOX_STEP_TIMEOUT", "inf", "above 0"),
        ("TREE", "a", "NAME=FILE"),
        ("TREE", "a=x,a=y", "each name once"),
        ("ALLOW_PROCESSOR", "/does/not/exist", "cannot be read"),
        ("WATERMARK_KEY_FILE", "/does/not/exist", "cannot be read"),
        ("DEFAULT_PROCESSOR", "tree={", "tree: expected NAME"),
        ("DEFAULT_PROCESSOR", "mine=@/does/not/exist", "mine: /does/not/exist cannot be read"),
        ("STEP_TIMEOUT", "1", "no such setting"),
    ],
)
def test_error_names_the_variable(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^LOGITSHIP_VLLM_{name}: .*{expected}"):
        VllmSettings.from_environment({f"LOGITSHIP_VLLM_{name}": value})
