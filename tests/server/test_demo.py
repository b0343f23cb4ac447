"""The output of the demo, and the two processors that it ships."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.client.records import FinishReason, Generation, Receipt
from logitship.client.serialization.loading import instantiate_prepared
from logitship.server.config import ServerConfig
from logitship.server.demo import (
    PROMPTS,
    VARIANTS,
    demo_config,
    describe_receipts,
    describe_shipment,
    displayed_text,
    side_by_side,
)
from logitship.server.demo_processors import Alliteration, Lipogram

TOKENS = ["<end>", "Ġsea", "ĠSun", "tree", "Ġa", "▁sky", "s", None]


TOKENIZER = SimpleNamespace(convert_ids_to_tokens=lambda ids: [TOKENS[i] for i in ids])


def params_of(letter: str, **more: Any) -> dict[str, Any]:
    return {"letter": letter, "__req__": SimpleNamespace(eos_token_ids={0}), **more}


def test_lipogram_bans_each_rows_letter_but_not_the_end_token() -> None:
    lipogram = instantiate_prepared(Lipogram, TOKENIZER, len(TOKENS))
    logits = lipogram(torch.zeros(2, len(TOKENS)), [params_of("e"), params_of("s")])
    banned = [[i for i in range(len(TOKENS)) if row[i] == -torch.inf] for row in logits]
    assert banned == [[1, 3], [1, 2, 5, 6]]


def test_alliteration_boosts_word_starts() -> None:
    alliteration = instantiate_prepared(Alliteration, TOKENIZER, len(TOKENS))
    logits = alliteration(torch.zeros(2, len(TOKENS)), [params_of("s"), params_of("a", bias=1.5)])
    assert logits.tolist() == [[0, 3, 3, 0, 0, 3, 0, 0], [0, 0, 0, 0, 1.5, 0, 0, 0]]


def test_columns_fit_the_page_and_keep_every_word() -> None:
    texts = ["one two three four five " * 6, "six\n\nseven", ""]
    for width in (72, 80, 100, 120):
        page = side_by_side([(f"Title {i}", text) for i, text in enumerate(texts)], width)
        lines = page.splitlines()
        assert max(map(len, lines)) <= width
        assert sorted(word for line in lines[2:] for word in line.split()) == sorted(" ".join(texts).split())
        assert lines[0].split("   ")[0].strip() == "Title 0"


def test_narrow_page_stacks_the_columns() -> None:
    page = side_by_side([("First", "one two"), ("Second", "three")], 30)
    assert page == "First\n-----\none two\n\nSecond\n------\nthree"


def test_paragraphs_are_kept() -> None:
    assert side_by_side([("T", "a\n\nb")], 30) == "T\n-\na\n\nb"


@pytest.mark.parametrize(("kind", "expected"), [("stop", "Hi"), ("length", "Hi …")])
def test_truncated_text_ends_with_an_ellipsis(kind: str, expected: str) -> None:
    assert displayed_text(Generation(text=" Hi\n", finish_reason=FinishReason(kind), raw={})) == expected


def test_shipment_has_sizes_and_digests() -> None:
    text = describe_shipment(VARIANTS)
    assert "Lipogram" in text
    assert "Alliteration" in text
    assert text.count(" bytes, sha256:") == 2


def test_receipts_are_aligned() -> None:
    digest = "sha256:" + "0" * 64
    lines = describe_receipts([Receipt(digest, "A", 5, 1.25), Receipt(digest, "Longer", 48, 20.0)]).splitlines()
    assert len({line.index("sha256:") for line in lines}) == 1
    assert lines[1].split() == ["Longer", digest[:26] + "…", "48", "steps", "20.0", "ms"]
    assert describe_receipts([]) == ""


def test_demo_server_is_local() -> None:
    given = ServerConfig(
        host="0.0.0.0",
        port=80,
        api_key="secret",
        shipping_api_key="another",
        enable_custom_logit_processor=True,
        model_path="some/model",
    )
    config = demo_config(given)
    assert (config.host, config.port, config.api_key, config.shipping_api_key) == ("127.0.0.1", 0, (), ())
    assert config.enable_custom_logit_processor
    assert config.model_path == "some/model"


@pytest.mark.slow
def test_command_on_the_default_model() -> None:
    """Both questions are answered plainly and by two classes in sandboxes. The narrow page stacks the answers."""
    command = [Path(sysconfig.get_path("scripts"), "logitship"), "demo"]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "30"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = {
        variant.title: re.findall(rf"^   {variant.title}\n   -+\n((?:   .+\n)+)", done.stdout, re.MULTILINE)
        for variant in VARIANTS
    }
    assert [len(texts) for texts in answers.values()] == [len(PROMPTS)] * 3, done.stdout
    assert ["e" in text.lower() for text in answers["Plain model"] + answers["Lipogram"]] == [True, True, False, False]
    receipts = re.findall(r"^   (\w+) +sha256:\w+…  +(\d+) steps", done.stdout, re.MULTILINE)
    assert sorted(name for name, _ in receipts) == ["Alliteration"] * 2 + ["Lipogram"] * 2
    assert all(int(steps) > 0 for _, steps in receipts)
