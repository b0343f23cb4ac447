from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from logitship.builtin_processors.trees.token_tree import Place, TokenTree
from logitship.builtin_processors.trees.token_tree_format import TreeFormatError, load_tree, read_tree

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "rtp_llm.json").read_text())["tree_config_loader"]

SOFT_FAILURES = {
    "comment_syntax": "line 1, column 2",
    "plus_sign_number": "line 1, column 24",
    "trailing_garbage": "line 1, column 29: Extra data",
    "empty_file": "line 1, column 1",
}
"""Files that RTP-LLM's first parser does not take. Its second one would take the first two, since it knows comments and
signs. Here, as in JSON, they are errors."""


def load(path: Path, text: str) -> TokenTree:
    file = path / "tree.json"
    file.write_text(text)
    return load_tree(file)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_recorded(case: dict[str, Any], tmp_path: Path) -> None:
    expected = case["expect"]
    if not expected.get("ok", False):
        with pytest.raises(TreeFormatError, match=SOFT_FAILURES.get(case["name"])):
            load(tmp_path, case["file_text"])
        return
    tree = load(tmp_path, case["file_text"])
    assert (tree.start_token_id, tree.end_token_id) == (expected["start_token_id"], expected["end_token_id"])
    assert tree.sep == expected["sep"]
    assert len(tree) == len(expected["map"])
    for path, tokens in expected["map"].items():
        assert path in tree
        # A path without candidates has the EOS token, see `test_token_tree.py`.
        assert tree.candidates(Place(path)).tolist() == (tokens or [tree.end_token_id])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected an object, got an array"),
        ("null", "expected an object, got null"),
        ('{"sep": 5}', "sep: expected a string, got 5"),
        ('{"start_token_id": 1.0}', "start_token_id: expected an integer of 32 bits, got 1.0"),
        ('{"start_token_id": 1e2}', "start_token_id: expected an integer of 32 bits, got 100.0"),
        ('{"end_token_id": true}', "end_token_id: expected an integer of 32 bits, got True"),
        ('{"end_token_id": {}}', "end_token_id: expected an integer of 32 bits, got an object"),
        ('{"end_token_id": 2147483648}', "end_token_id: expected an integer of 32 bits, got 2147483648"),
        ('{"end_token_id": -2147483649}', "end_token_id: expected an integer of 32 bits, got -2147483649"),
        ('{"sep": 1, "sep": "_"}', "sep: expected a string, got 1"),
        ('{"prefix_dict": []}', "prefix_dict: expected an object, got an array"),
        ('{"prefix_dict": {"225": {"1": []}}}', "prefix_dict['225']: expected an array of integers, got an object"),
        ('{"prefix_dict": {"225": "1"}}', "prefix_dict['225']: expected an array of integers, got '1'"),
        ('{"prefix_dict": {"225": [1, true]}}', "prefix_dict['225'][1]: expected an integer, got True"),
        ('{"prefix_dict": {"225": [1, [2]]}}', "prefix_dict['225'][1]: expected an integer, got an array"),
        ('{"prefix_dict": {"225": [1, {}]}}', "prefix_dict['225'][1]: expected an integer, got an object"),
        ('{"prefix_dict": {"225": [18446744073709551616]}}', "[0]: expected an integer, got 18446744073709551616"),
        ('{"prefix_dict": {"225": [-9223372036854775809]}}', "[0]: expected an integer, got -9223372036854775809"),
        ('{"prefix_dict": {"": []}}', "prefix_dict['']: a path cannot be empty"),
        ('{"prefix_dict": {"": {}}}', "prefix_dict['']: a path cannot be empty"),
        ('{"": []}', 'the member without a name ("") holds an array or an object'),
        ('{"": {"a": {}}}', 'the member without a name ("") holds an array or an object'),
        ('{"prefix_dict":\n {"225": [1,]}}', "line 2, column 1"),
        ('{"sep": NaN}', "is not JSON: NaN is not a JSON number"),
        ("[" * 100_000, "is not JSON: "),
        ("1" * 5000, "is not JSON: "),
    ],
)
def test_errors_name_the_position(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TreeFormatError, match=re.escape(message)):
        load(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        '{"prefix_dict": {"": 5, "225": [1]}}',
        '{"": 5, "prefix_dict": {"225": [1]}}',
        '{"": {"a": 1}, "prefix_dict": {"225": [1]}}',
        '{"prefix_dict": {"225": [1]}, "start_token_id": 7, "start_token_id": 225}',
        '{"prefix_dict": {"225": [1, 18446744073709551615, -9223372036854775808]}}',
        '{"other": 1.5, "more": [{"prefix_dict": 5}], "prefix_dict": {"225": [1]}, "null": null}',
    ],
)
def test_accepted_oddities(text: str, tmp_path: Path) -> None:
    tree = load(tmp_path, text)
    assert tree.candidates(tree.start).tolist() == [1]


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_bytes(b'{"sep": "\xff"}')
    with pytest.raises(TreeFormatError, match="is not JSON: 'utf-8' codec"):
        load_tree(tmp_path / "tree.json")
    with pytest.raises(OSError, match="No such file"):
        load_tree(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("{}", r"prefix_dict has no key '225', where every sequence starts: only the EOS token 2 can be sampled"),
        ('{"prefix_dict": {"225_1": [1]}}', "prefix_dict has no key '225', where every sequence starts"),
        ('{"prefix_dict": {"225": [1, -1, 3000000000]}}', "left out 2 token ids that are negative or above"),
    ],
)
def test_warnings(text: str, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path, text)
    (record,) = caplog.records
    assert re.search(warning, record.getMessage())
    assert str(tmp_path / "tree.json") in record.getMessage()


@pytest.mark.parametrize("case", [case for case in RECORDED if "map" in case["expect"]], ids=lambda case: case["name"])
def test_object_is_read_like_a_file(case: dict[str, Any]) -> None:
    """In parsed JSON, the last one of duplicate names remains."""
    value = json.loads(case["file_text"])
    tree = read_tree(value)
    assert len(tree) == len(value.get("prefix_dict", {}))
    for path in value.get("prefix_dict", {}):
        assert tree.candidates(Place(path)).tolist() == (case["expect"]["map"][path] or [tree.end_token_id])


def test_object_with_non_string_keys() -> None:
    with pytest.raises(TreeFormatError, match="prefix_dict: expected keys that are strings, got 225"):
        read_tree({"prefix_dict": {225: [1]}})
