from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logitship.server.sglang.unsupported import check_configuration, skips_processors


def arguments(**changed: Any) -> Any:
    defaults = {"tokenizer_worker_num": 1, "pp_size": 1, "disaggregation_mode": "null", "dllm_algorithm": None}
    return SimpleNamespace(**defaults | changed)


def test_default_configuration_is_supported() -> None:
    check_configuration(arguments())


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"pp_size": 2}, "--pp-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"dllm_algorithm": "x"}, "--dllm-algorithm"),
    ],
)
def test_unsupported_configuration_names_its_argument(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_configuration(arguments(**changed))


def test_rust_server_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "true")
    with pytest.raises(ValueError, match="SGLANG_RUST_SERVER"):
        check_configuration(arguments())


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"speculative_algorithm": None, "disable_overlap_schedule": False}, False),
        ({"speculative_algorithm": "NGRAM", "disable_overlap_schedule": True}, False),
        ({"speculative_algorithm": "NGRAM", "disable_overlap_schedule": False}, True),
        ({"speculative_algorithm": "NGRAM", "disable_overlap_schedule": False, "device": "cpu"}, False),
        ({"speculative_algorithm": "EAGLE", "disable_overlap_schedule": True}, True),
    ],
)
def test_which_speculation_skips_processors(changed: dict[str, Any], expected: bool) -> None:
    assert skips_processors(SimpleNamespace(**{"device": "cuda", **changed})) is expected
