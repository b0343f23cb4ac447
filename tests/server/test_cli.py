from __future__ import annotations

import dataclasses
import gc
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.server import cli
from logitship.server.config import ServerConfig
from logitship.server.engine import build
from logitship.server.flags import FLAG_OF_FIELD
from logitship.server.refusals import StartError


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "LOGITSHIP_API_KEY",
        "LOGITSHIP_SHIPPING_API_KEY",
        "LOGITSHIP_METRICS_API_KEY",
        "TREE_DECODE_CONFIG",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """Configs that the commands were called with; the commands do nothing else."""
    found: list[ServerConfig] = []

    def command(config: ServerConfig) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(cli, "_COMMANDS", {"serve": command, "demo": command})
    return found


OTHER_VALUES: dict[type, str] = {int: "7", float: "0.25", str: "other"}


def every_flag() -> list[Any]:
    return [
        pytest.param(spelling, flag.field, id=spelling)
        for flag in FLAG_OF_FIELD.values()
        for spelling in flag.spellings
    ]


@pytest.mark.parametrize(("flag", "field"), every_flag())
def test_every_spelling_sets_its_field(flag: str, field: str, configs: list[ServerConfig], tmp_path: Path) -> None:
    default = getattr(ServerConfig(), field)
    allowed = tmp_path / "allowed"
    allowed.touch()
    key = tmp_path / "key"
    key.write_text("a secret of the tests")
    also = {"enable_custom_logit_processor": True} if field == "shipping_api_key" else {}
    written: list[str] = {
        "dtype": ["bfloat16"],
        "model_impl": ["transformers"],
        "speculative_algorithm": ["NGRAM"],
        "logprobs_mode": ["processed_logprobs"],
        "processor_isolation": ["none"],
        "tool_call_parser": ["hermes"],
        "log_level": ["error"],
        "log_format": ["json"],
        "max_model_len": ["7"],
        "max_queued_bytes": ["99999999"],
        "prefix_cache_bytes": ["7"],
        "random_seed": ["7"],
        "allow_processor": [str(allowed)],
        "blocked_digests": [str(allowed)],
        "allowed_origin": ["https://app.example.org"],
        "tree": ["cities=cities.json"],
        "default_processor": ["disallowed_tokens={}"],
        "watermark_key_file": [str(key)],
        "reasoning_config": ['{"reasoning_parser": "qwen3"}'],
    }.get(field) or ([] if default is False else [OTHER_VALUES.get(type(default), "other")])
    assert cli.main(["serve", flag, *written, *("--enable-custom-logit-processor" for _ in also)]) == 0
    value = getattr(configs[0], field)
    read = tuple(written) if isinstance(default, tuple) else type(value)(written[0]) if written else True
    assert value == read
    assert value != default
    assert dataclasses.replace(configs[0], **{field: default}) == ServerConfig(**also)


def test_every_field_has_a_flag() -> None:
    assert FLAG_OF_FIELD.keys() == {field.name for field in dataclasses.fields(ServerConfig)}


def test_sglang_and_vllm_spellings(configs: list[ServerConfig]) -> None:
    flags = {"--model": "m", "--max-running-requests": "3", "--context-length": "9", "--gpu-memory-utilization": "0.2"}
    cli.main(["serve", *(word for flag in flags.items() for word in flag)])
    assert configs == [ServerConfig(model_path="m", max_num_seqs=3, max_model_len=9, mem_fraction_static=0.2)]


@pytest.mark.parametrize("arguments", [["tiny"], ["tiny", "--model", "tiny"], ["--port", "1", "tiny"]])
def test_model_without_a_flag(arguments: list[str], configs: list[ServerConfig]) -> None:
    assert cli.main(["serve", *arguments]) == 0
    assert configs[0].model_path == "tiny"


def test_defaults_without_flags(configs: list[ServerConfig]) -> None:
    assert cli.main(["serve"]) == 0
    assert cli.main(["demo"]) == 0
    assert configs == [ServerConfig(), ServerConfig()]
    assert configs[0].port == 30000


def test_repeated_and_multiple_keys(configs: list[ServerConfig]) -> None:
    ship = ["--enable-custom-logit-processor", "--shipping-api-key", "s"]
    assert cli.main(["serve", "--api-key", "a", "b", "--api-key", "c", *ship, "--shipping-api-key", "t"]) == 0
    assert (configs[0].api_key, configs[0].shipping_api_key) == (("a", "b", "c"), ("s", "t"))


def test_keys_from_the_environment(configs: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITSHIP_API_KEY", "a,b")
    monkeypatch.setenv("LOGITSHIP_SHIPPING_API_KEY", "s")
    ship = "--enable-custom-logit-processor"
    assert cli.main(["serve", ship]) == 0
    assert cli.main(["serve", ship, "--api-key", "c"]) == 0
    assert cli.main(["serve", ship, "--shipping-api-key", "t"]) == 0
    monkeypatch.setenv("LOGITSHIP_SHIPPING_API_KEY", "")
    assert cli.main(["serve"]) == 0
    assert cli.main(["demo"]) == 0  # it talks to itself
    keys = [(config.api_key, config.shipping_api_key) for config in configs]
    assert keys == [(("a", "b"), ("s",)), (("c",), ("s",)), (("a", "b"), ("t",)), (("a", "b"), ()), ((), ())]


def test_metrics_key_from_the_environment(configs: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITSHIP_METRICS_API_KEY", "m,n")
    assert cli.main(["serve"]) == 0
    assert cli.main(["serve", "--metrics-api-key", "o"]) == 0
    assert [config.metrics_api_key for config in configs] == [("m", "n"), ("o",)]


def test_tree_from_the_environment(configs: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("tree.json", ""):
        monkeypatch.setenv("TREE_DECODE_CONFIG", value)
        assert cli.main(["serve"]) == 0
        assert cli.main(["serve", "--tree-decode-config", "other.json"]) == 0
    assert [config.tree_decode_config for config in configs] == ["tree.json", "other.json", None, "other.json"]


def test_trees(configs: list[ServerConfig]) -> None:
    assert cli.main(["serve", "--tree", "a=a.json", "b=b=b.json", "--tree", "c=/c"]) == 0
    assert configs[0].named_trees == {"a": "a.json", "b": "b=b.json", "c": "/c"}


def test_empty_key_in_the_environment(
    configs: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGITSHIP_API_KEY", "hush,")
    with pytest.raises(SystemExit):
        cli.main(["serve"])
    stderr = capsys.readouterr().err
    assert "api_key: a key is empty" in stderr
    assert "hush" not in stderr
    assert configs == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-num-seqs", "0"], "max_num_seqs must be 1 or greater, not 0"),
        (["serve", "--max-num-seqs", "many"], "expected a whole number, got 'many'"),
        (["serve", "--mem-fraction-static", "nan"], "mem_fraction_static must be above 0"),
        (["serve", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["serve", "--processor-isolation", "magic"], "invalid choice: 'magic'"),
        (["serve", "--nonsense"], "unknown flag --nonsense (all flags"),
        (["serve", "--port", "70000"], "(all flags: logitship serve --help)"),
        (["serve", "--prot", "1"], "unknown flag --prot: did you mean --port?"),
        (["check", "a:B", "--modle-path=x"], "unknown flag --modle-path: did you mean --model-path?"),
        (["serve", "tiny", "huge"], "unexpected argument 'huge'"),
        (["serve", "tiny", "--model", "huge"], "two models: 'tiny', and 'huge' of --model-path"),
        (["serve", "--sandbox-memory", "1GiB"], "'1GiB' has a unit: if it is about bytes, write 1073741824"),
        (["serve", "--max-request-bytes", "1.5 MB"], "write 1500000"),
        (["serve", "--shipping-api-key", "s"], "set enable_custom_logit_processor as well"),
        (["serve", "--allow-processor", "./nowhere"], "allow_processor: ./nowhere cannot be read"),
        (["serve", "--sandbox-cpu-time", "nan"], "sandbox_cpu_time must be above 0"),
        (["serve", "--reasoning-config", "qwen3"], "reasoning_config: is not JSON"),
        (["serve", "--port"], "expected one argument"),
        (["serve", "--tree", "a.json"], "tree: expected NAME=FILE, got 'a.json'"),
        (["serve", "--tree", "=a.json"], "tree: expected NAME=FILE"),
        (["serve", "--tree", "a="], "tree: expected NAME=FILE"),
        (["serve", "--tree", "a=1", "a=2"], "tree: two trees are named 'a'"),
        (["serve", "--tree", "a=1", "--tree-decode-config", "a"], "tree: two trees are named 'a'"),
        (["serve", "--watermark-key-file", "./nowhere"], "watermark_key_file: ./nowhere cannot be read: No such file"),
        (["serve", "--default-processor", "=x"], "default_processor: expected NAME, NAME={…}"),
        (["serve", "--default-processor", "tree=[1]"], "default_processor: tree: expected NAME, NAME={…}"),
        (["serve", "--default-processor", "tree=@./nowhere"], "default_processor: tree: ./nowhere cannot be read: No"),
        (["serve", "--host", "0.0.0.0", "--enable-custom-logit-processor"], "permit it with --allow-anonymous-code"),
        (["serve", "--allowed-origin", "app.example.org"], "allowed_origin: expected SCHEME://HOST"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for flag in FLAG_OF_FIELD.values():
        assert all(spelling in shown for spelling in flag.spellings)
    assert "(default: 30000)" in shown
    assert "(default: SmolLM2-135M-Instruct)" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("logitship 0.")


def test_missing_torch_names_the_extra_to_install(
    configs: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == 'This needs the server: pip install "logitship[serve]"\n'
    assert configs == []


def test_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model-path", "./nowhere.gguf", "--port", "0"]) == 1
    assert capsys.readouterr().err.endswith("logitship: there is no GGUF file './nowhere.gguf'\n")


def test_garbage_is_collected_after_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting: list[bool] = []

    def fail(config: ServerConfig) -> None:
        collecting.append(gc.isenabled())
        raise StartError("as requested")

    monkeypatch.setattr(build, "build_engine", fail)
    assert cli.main(["serve", "--port", "0"]) == 1
    assert [*collecting, gc.isenabled()] == [False, True]


def test_missing_device(capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is looked for, which `tiny` does not name."""
    count = torch.cuda.device_count()
    device = f"cuda:{count}" if count else "cuda"
    assert cli.main(["serve", "tiny", "--device", device, "--port", "0"]) == 1
    message = rf"logitship: cannot use --device {device}: [^\n]+ \(usable here: auto, cpu[^\n]*\)\n"
    assert re.fullmatch(message, capsys.readouterr().err)
