from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from logitship.server.sglang.hooks import make_front_end, make_steps, needs_verdict
from logitship.server.sglang.unsupported import check_configuration, skips_processors


def arguments(**changed: Any) -> Any:
    defaults = {
        "enable_custom_logit_processor": True,
        "tokenizer_worker_num": 1,
        "use_ray": False,
        "smg_grpc_mode": False,
        "attn_cp_size": 1,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "dllm_algorithm": None,
    }
    return SimpleNamespace(**defaults | changed)


@pytest.fixture
def resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang decide about arguments, as it does after it has read the model's configuration."""
    module = ModuleType("sglang.srt.arg_groups.overrides")
    module.resolving_view = lambda raw: SimpleNamespace(**{**vars(raw), **raw.decided})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_default_configuration_is_supported() -> None:
    check_configuration(arguments())


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"use_ray": True}, "--use-ray"),
        ({"smg_grpc_mode": True}, "--smg-grpc-mode"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"dllm_algorithm": "x"}, "--dllm-algorithm"),
    ],
)
def test_unsupported_configuration_names_its_argument(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_configuration(arguments(**changed))


@pytest.mark.parametrize("value", ["true", "1", "Yes", "y"])
def test_rust_server_is_unsupported(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", value)
    with pytest.raises(ValueError, match="SGLANG_RUST_SERVER"):
        check_configuration(arguments())


@pytest.mark.usefixtures("resolution")
@pytest.mark.parametrize("make", [make_front_end, make_steps])
def test_server_with_an_unsupported_configuration_does_not_start(make: Any) -> None:
    """Both check: SGLang may load no plugins in its schedulers. Some arguments are decided by SGLang itself."""
    started: list[Any] = []
    with pytest.raises(ValueError, match="--attn-cp-size"):
        make(lambda *args: started.append(args), object(), arguments(decided={"attn_cp_size": 2}))
    assert not started


@pytest.mark.usefixtures("resolution")
@pytest.mark.parametrize("make", [make_front_end, make_steps])
def test_server_without_processors_starts_with_any_configuration(make: Any) -> None:
    started: list[Any] = []
    server_args = arguments(use_ray=True, enable_custom_logit_processor=False, decided={})
    make(lambda *args: started.append(args), object(), server_args)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        *((each, False) for each in (None, "NGRAM", "EAGLE", "EAGLE3", "STANDALONE")),
        *((each, True) for each in ("DFLASH", "FROZEN_KV_MTP", "UNO", "a plugin's")),
    ],
)
def test_which_speculation_skips_processors(algorithm: str | None, expected: bool) -> None:
    assert skips_processors(SimpleNamespace(speculative_algorithm=algorithm)) is expected


@pytest.mark.parametrize(
    ("has_processors", "num_pending", "is_disabled", "expected"),
    [
        (True, 1, False, True),
        (True, 0, False, False),
        (False, 1, False, False),
        (False, 1, True, True),
        (None, 1, False, False),
    ],
)
def test_step_with_processors_begins_after_the_verdict_about_the_last_drafts(
    has_processors: bool | None, num_pending: int, is_disabled: bool, expected: bool
) -> None:
    """None: SGLang has nothing to compute."""
    info = SimpleNamespace(has_custom_logit_processor=has_processors)
    batch = None if has_processors is None else SimpleNamespace(sampling_info=info)
    scheduler = SimpleNamespace(result_queue=[object()] * num_pending)
    assert needs_verdict(lambda *_: is_disabled, scheduler, batch, None) is expected
