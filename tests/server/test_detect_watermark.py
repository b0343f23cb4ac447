from __future__ import annotations

import io
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from logitship.builtin_processors import detect_watermark
from logitship.server import cli
from logitship.server.config import ServerConfig
from logitship.server.model import model_loader
from logitship.server.tokenizer import Tokenizer
from tests.helpers.watermarks import WATERMARK_KEY

TOKENS = random.Random(0).choices(range(4, 100), k=60)


@pytest.fixture
def key(tmp_path: Path) -> str:
    (tmp_path / "key").write_bytes(WATERMARK_KEY.secret + b"\n")
    return str(tmp_path / "key")


@pytest.fixture(autouse=True)
def models(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models whose vocabulary was loaded; it is the tiny one's."""
    found = []

    def load(config: ServerConfig) -> tuple[Tokenizer, int]:
        found.append(config.model_path)
        return tokenizer, 260

    monkeypatch.setattr(model_loader, "load_vocabulary", load)
    return found


def test_token_ids(key: str, tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    command = ["detect-watermark", str(file), "--token-ids", "--watermark-key-file", key, "--model-path", "tiny"]
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == asdict(detect_watermark(TOKENS, WATERMARK_KEY, vocab_size=260))
    params = {"ngram_len": 3}
    assert cli.main([*command, "--processor", "watermark_synthid", "--params", json.dumps(params)]) == 0
    found = detect_watermark(TOKENS, WATERMARK_KEY, "watermark_synthid", params, vocab_size=260)
    assert capsys.readouterr().out == (
        "watermark:  watermark_synthid\n"
        f"tokens:     60, of which {found.num_scored} are scored\n"
        f"score:      {found.score:.4f} (texts without the mark: 0.5000)\n"
        f"z-score:    {found.z_score:.2f}\n"
        f"p-value:    {found.p_value:.3g}\n"
    )
    assert models == ["tiny"] * 2


def test_text_from_stdin(
    key: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "The capital of France is Paris."
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert cli.main(["detect-watermark", "--watermark-key-file", key, "--json"]) == 0
    tokens = tokenizer.encode(text, add_special_tokens=False)
    expected = asdict(detect_watermark(tokens, WATERMARK_KEY, vocab_size=260))
    assert json.loads(capsys.readouterr().out) == expected


def test_text_without_a_score(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    assert cli.main(["detect-watermark", str(tmp_path / "empty"), "--watermark-key-file", key, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_scored"], found["score"], found["p_value"]) == (0, None, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}", "--token-ids"], "name the file with the key: --watermark-key-file FILE"),
        (["{file}", "--watermark-key-file", "./nowhere"], "watermark_key_file: ./nowhere cannot be read"),
        (["./nowhere", "--watermark-key-file", "{key}"], "./nowhere cannot be read"),
        (["{file}", "--token-ids", "--watermark-key-file", "{key}"], "expected a list of token ids, as JSON"),
        (["{file}", "--watermark-key-file", "{key}", "--params", "[1]"], "--params: expected a JSON object"),
        (["{file}", "--watermark-key-file", "{key}", "--params", "{{"], "--params: expected a JSON object: "),
        (["{file}", "--watermark-key-file", "{key}", "--processor", "kgw"], "no watermark is named 'kgw'"),
        (["{file}", "--watermark-key-file", "{key}", "--params", '{{"bias": -1.0}}'], "bias: expected a number from 0"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text"
    file.write_text('["a text"]')
    command = [each.format(file=file, key=key) for each in arguments]
    assert cli.main(["detect-watermark", *command]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("logitship detect-watermark: ")
    assert message in shown
    assert "secret" not in shown
