from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.builtin_processors import installed_processors
from logitship.builtin_processors.parts.sampling_rule import RandomRowsProcessor
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS
from logitship.client.http.vllm_handshake import PROBE, PluginInfo
from logitship.server.vllm import params_validation
from logitship.server.vllm.params_validation import admit
from tests.server.vllm.conftest import MakeParams

FAULT_TOKEN = 63
SAMPLERS = [
    "dry",
    "entropy_stop",
    *sorted(each.name for each in BUILTIN_PROCESSORS if issubclass(each, RandomRowsProcessor)),
]
COUNTS = """
from logitship import CustomLogitProcessor

class Counts(CustomLogitProcessor):
    params_schema = {"required": ["sentences"]}

    def __call__(self, logits, custom_param_list=None):
        return logits
"""


class InputProcessor:
    """Fake of vLLM's class of this name, which calls the plugin."""

    def __init__(self) -> None:
        config = SimpleNamespace(
            skip_tokenizer_init=True, get_vocab_size=lambda: 64, try_get_generation_config=lambda: {"eos_token_id": 1}
        )
        self.vllm_config = SimpleNamespace(model_config=config)

    def admit(self, params: Any) -> None:
        admit(params)


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> InputProcessor:
    monkeypatch.setenv("LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR", "1")
    monkeypatch.setenv("LOGITSHIP_VLLM_PROCESSOR_ISOLATION", "none")
    monkeypatch.setattr(params_validation, "_front_ends", {})
    return InputProcessor()


def test_request_without_processors_is_unchanged(vllm_params: MakeParams) -> None:
    params = vllm_params({"unrelated": 1}, stop_token_ids=[3])
    admit(params)  # from any caller
    assert params.stop_token_ids == [3]


def test_fault_token_is_added_to_stop_tokens_once(
    front_end: InputProcessor, vllm_params: MakeParams, processor_string: str
) -> None:
    params = vllm_params({"custom_logit_processor": processor_string}, stop_token_ids=[3])
    for _ in range(2):  # offline, several prompts may share the object
        front_end.admit(params)
        assert params.stop_token_ids == [3, FAULT_TOKEN]
    without = vllm_params({"custom_logit_processor": processor_string}, stop_token_ids=None)
    front_end.admit(without)
    assert without.stop_token_ids == [FAULT_TOKEN]


def test_plugin_info_is_returned(front_end: InputProcessor, vllm_params: MakeParams) -> None:
    with pytest.raises(ValueError, match="logitship") as caught:
        front_end.admit(vllm_params({**PROBE}))
    assert PluginInfo.from_message(f"vLLM: {caught.value}") == PluginInfo(FAULT_TOKEN)


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        ({"custom_logit_processor": "{}"}, "none of the keys"),
        ({"custom_logit_processor": json.dumps({"source": "x =", "class_name": "X"})}, "not valid Python"),
        (
            {"custom_logit_processor": json.dumps({"name": "nothing"})},
            "no processor is installed or registered as 'nothing'",
        ),
        (
            {"custom_logit_processor": json.dumps({"name": "grammar"})},
            "no processor is installed or registered as 'grammar'",
        ),
        (
            {"custom_logit_processor": json.dumps({"name": "disallowed_tokens"})},
            "disallowed_tokens: token_ids: missing",
        ),
        (
            {"custom_logit_processor": json.dumps({"source": COUNTS, "class_name": "Counts"})},
            r"parameters of Counts: params: 'sentences' is a required property",
        ),
        (
            {
                "logits_processors": [
                    {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [3]}},
                    {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [3], "tokens": 1}},
                ]
            },
            r"logits_processors\[1\]: .*tokens: disallowed_tokens has no such parameter",
        ),
    ],
)
def test_invalid_processors_are_refused(
    front_end: InputProcessor, vllm_params: MakeParams, extra_args: dict[str, Any], expected: str
) -> None:
    params = vllm_params(extra_args)
    with pytest.raises(ValueError, match=expected):
        front_end.admit(params)
    assert params.stop_token_ids == []


def test_shipping_is_off_by_default(
    front_end: InputProcessor, vllm_params: MakeParams, processor_string: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR")
    with pytest.raises(ValueError, match="LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR=1"):
        front_end.admit(vllm_params({"custom_logit_processor": processor_string}))
    installed = {"custom_logit_processor": '{"name": "disallowed_tokens"}', "custom_params": '{"token_ids": [3]}'}
    front_end.admit(vllm_params(installed))


def test_allow_list(
    front_end: InputProcessor,
    vllm_params: MakeParams,
    processor_string: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    (tmp_path / "allowed").write_text("")
    monkeypatch.setenv("LOGITSHIP_VLLM_ALLOW_PROCESSOR", str(tmp_path / "allowed"))
    with pytest.raises(ValueError, match="lists them with LOGITSHIP_VLLM_ALLOW_PROCESSOR"):
        front_end.admit(vllm_params({"custom_logit_processor": processor_string}))


def test_named_trees(
    front_end: InputProcessor, vllm_params: MakeParams, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps({"prefix_dict": {"225": [3], "225_3": [4]}}))
    monkeypatch.setenv("LOGITSHIP_VLLM_TREE", f"mine={tree}")
    named = {"custom_logit_processor": '{"name": "tree"}', "custom_params": '{"tree": "mine"}'}
    front_end.admit(vllm_params(named))
    with pytest.raises(ValueError, match="the server loaded: mine"):
        front_end.admit(vllm_params({**named, "custom_params": '{"tree": "other"}'}))


def test_missing_tree_file(front_end: InputProcessor, vllm_params: MakeParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITSHIP_VLLM_TREE", "mine=/does/not/exist")
    with pytest.raises(ValueError, match="LOGITSHIP_VLLM_TREE: /does/not/exist cannot be read"):
        front_end.admit(vllm_params({"custom_logit_processor": '{"name": "tree"}'}))


def test_watermark_has_the_key_of_the_settings(
    front_end: InputProcessor, vllm_params: MakeParams, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    marked = {"custom_logit_processor": '{"name": "watermark_kgw"}'}
    with pytest.raises(ValueError, match="its operator sets one with LOGITSHIP_VLLM_WATERMARK_KEY_FILE"):
        front_end.admit(vllm_params(marked))
    (tmp_path / "key").write_text("a secret of the tests")
    monkeypatch.setenv("LOGITSHIP_VLLM_WATERMARK_KEY_FILE", str(tmp_path / "key"))
    InputProcessor().admit(vllm_params(marked))


DEFAULT = {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [5]}}
OWN = {"processor": {"name": "gen_length"}, "params": {"boost_factor": 1.0}}


@pytest.fixture
def default_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor of every request: `DEFAULT`."""
    monkeypatch.setenv("LOGITSHIP_VLLM_DEFAULT_PROCESSOR", 'disallowed_tokens={"token_ids": [5]}')
    params_validation._settings_have_defaults.cache_clear()
    yield
    params_validation._settings_have_defaults.cache_clear()


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        (None, [DEFAULT]),
        ({"unrelated": 1}, [DEFAULT]),
        (
            {"custom_logit_processor": '{"name": "multi_sequence"}'},
            [{"processor": '{"name": "multi_sequence"}'}, DEFAULT],
        ),
        ({"logits_processors": [OWN]}, [OWN, DEFAULT]),
        ({"logits_processors": json.dumps([OWN, OWN])}, [OWN, OWN, DEFAULT]),
        ({"logits_processors": [DEFAULT, OWN]}, [DEFAULT, OWN, DEFAULT]),
    ],
)
@pytest.mark.usefixtures("default_processor")
def test_processor_of_every_request(
    front_end: InputProcessor, vllm_params: MakeParams, extra_args: dict[str, Any] | None, expected: list[Any]
) -> None:
    params = vllm_params(extra_args)
    for _ in range(2):  # offline, several prompts may share the object
        front_end.admit(params)
        assert json.loads(params.extra_args["logits_processors"]) == expected
        assert "custom_logit_processor" not in params.extra_args
        assert FAULT_TOKEN in params.stop_token_ids


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"logits_processors": [OWN] * 64}, "the list must have 1 to 64 processors, not 65"),
        ({"logits_processors": '{"name": "multi_sequence"}'}, "logits_processors: must be a list"),
        ({"logits_processors": []}, "the list must have 1 to 64 processors, not 0"),
        ({"logits_processors": "[", "custom_params": {}}, "logits_processors: is not JSON"),
        ({"custom_logit_processor": "{}"}, "none of the keys"),
    ],
)
@pytest.mark.usefixtures("default_processor")
def test_mistakes_beside_a_processor_of_every_request(
    front_end: InputProcessor, vllm_params: MakeParams, extra_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        front_end.admit(vllm_params(extra_args))


@pytest.mark.usefixtures("default_processor")
def test_pooling_requests_have_no_processors() -> None:
    params = SimpleNamespace(extra_args=None)
    admit(params)
    assert params.extra_args is None


def test_each_model_has_its_own_front_end(
    front_end: InputProcessor, vllm_params: MakeParams, processor_string: str
) -> None:
    other = InputProcessor()
    other.vllm_config.model_config.get_vocab_size = lambda: 32
    params = vllm_params({"custom_logit_processor": processor_string})
    other.admit(params)
    front_end.admit(params)
    assert params.stop_token_ids == [31, FAULT_TOKEN]


def test_unknown_caller_is_refused(front_end: InputProcessor, vllm_params: MakeParams, processor_string: str) -> None:
    with pytest.raises(ValueError, match="this version of vLLM"):
        admit(vllm_params({"custom_logit_processor": processor_string}))


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_need_no_shipping(
    name: str, front_end: InputProcessor, vllm_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR")
    processor = installed_processors().get(name)
    params = {**processor.example, **({"dry_sequence_breakers": []} if name == "dry" else {})}
    front_end.admit(vllm_params({"custom_logit_processor": json.dumps({"name": name}), "custom_params": params}))
    wrong = {"logits_processors": [{"processor": {"name": name}, "params": {"unknown": 1, **params}}]}
    with pytest.raises(ValueError, match=f"unknown: {name} has no such parameter"):
        front_end.admit(vllm_params(wrong))
