"""Tensors and arrays in processor strings: once, as raw bytes, or by their digests."""

from __future__ import annotations

import json
import pickletools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from logitship import CustomLogitProcessor, ProcessorLoadError
from logitship.client.serialization.artifact import Artifact, digest_of, raw_bytes
from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import PickledProcessor, parse, to_text
from logitship.client.serialization.serialize import serialize

WEIGHTS = torch.arange(4000.0)
HEAD = torch.nn.Linear(3000, 1)
TABLE = np.arange(2000, dtype=np.int32).reshape(20, 100)
COLUMNS = np.asfortranarray(TABLE[:, :50])
MASK = torch.zeros(2000, dtype=torch.bool)


class Weighs(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        number = float(TABLE[3, 4] + COLUMNS[2, 3]) + float(WEIGHTS[7]) + float(HEAD.weight[0, 5].detach())
        return logits + number + float(MASK.sum())


RAW_BYTES = sum(len(raw_bytes(each)) for each in (WEIGHTS, HEAD.weight, TABLE, COLUMNS, MASK))


def result_of(string: PickledProcessor) -> list[float]:
    found: list[float] = instantiate(load_class(string))(torch.zeros(1, 2)).flatten().tolist()
    return found


EXPECTED = Weighs()(torch.zeros(1, 2)).flatten().tolist()


def parsed(text: str) -> PickledProcessor:
    string = parse(text)
    assert isinstance(string, PickledProcessor)
    return string


def test_bytes_are_sent_once_also_with_source() -> None:
    text = Weighs.to_str()
    string = parsed(text)
    assert string.source is not None
    assert 2 * RAW_BYTES < len(text) < 2 * RAW_BYTES + 12_000
    assert result_of(string) == EXPECTED
    of_another_python = replace(string, python="2.7")
    assert of_another_python.runnable is string.source
    assert result_of(of_another_python) == EXPECTED
    assert string == parsed(to_text(string))


def test_stock_servers_need_only_torch_and_numpy() -> None:
    """Names in the pickle that load the bytes, as opcodes: no module that numpy 1 and 2 call differently."""
    texts = [argument for _, argument, _ in pickletools.genops(serialize(Weighs).payload) if isinstance(argument, str)]
    assert {"frombuffer", "reshape"} <= set(texts)
    assert not [each for each in texts if each.startswith(("numpy.", "logitship", "torch.storage"))]


@pytest.mark.parametrize("array", [TABLE, COLUMNS, TABLE[::2, ::3], np.array([(1, 2.0)], dtype="i4,f8"), np.float32(1)])
def test_arrays_come_back_as_they_were(array: Any) -> None:
    class Holds(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return array

    loaded = instantiate(load_class(parsed(Holds.to_str())))(torch.zeros(1))
    assert (loaded.dtype, loaded.shape, loaded.tolist()) == (array.dtype, array.shape, array.tolist())
    assert not isinstance(array, np.ndarray) or loaded.flags.writeable


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(2, 2).to_sparse(), "expected a dense CPU tensor, got torch.sparse_coo on cpu"),
        (torch.zeros(2, device="meta"), "expected a dense CPU tensor, got torch.strided on meta"),
        (np.array(["2026-01-01"], dtype="datetime64[D]"), "expected a tensor, an array or bytes, not ndarray"),
        (5, "expected a tensor, an array or bytes, not int"),
    ],
)
def test_data_without_raw_bytes(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^data: {message}$"):
        raw_bytes(data)


def test_artifacts_leave_only_digests_in_the_string() -> None:
    string = serialize(Weighs, artifact_size=4000)
    text = to_text(string)
    assert len(text) < 20_000
    digests = {each.digest for each in string.artifacts}
    assert digests == {digest_of(raw_bytes(each)) for each in (WEIGHTS, HEAD.weight, TABLE, COLUMNS)}
    assert set(json.loads(text)["logitship"]["artifacts"]) == digests
    assert result_of(string) == EXPECTED == result_of(replace(string, python="2.7"))


def test_equal_tensors_of_two_classes_are_one_artifact() -> None:
    copy = WEIGHTS.clone()

    class Other(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return logits + copy[0]

    (artifact,) = serialize(Other, artifact_size=4000).artifacts
    assert artifact in serialize(Weighs, artifact_size=4000).artifacts


def test_string_without_its_artifacts_says_how_to_upload_them() -> None:
    received = parsed(to_text(serialize(Weighs, artifact_size=4000)))
    for string in (received, replace(received, python="2.7"), replace(received, artifacts=())):
        with pytest.raises(ProcessorLoadError, match=r"sha256:\w{64} is missing: upload its bytes with POST"):
            load_class(string)
    with pytest.raises(ProcessorLoadError, match="is missing"):
        CustomLogitProcessor.from_str(to_text(received))


def test_tampered_parts_give_other_digests() -> None:
    """The source refers to digests: parts of the pickle that are not those bytes are not found."""
    form = json.loads(Weighs.to_str())
    offset, _, length = form["logitship"]["shared"].split(" ")[0].partition(":")
    form["logitship"]["shared"] = f"{int(offset) + 1}:{length}"
    with pytest.raises(ProcessorLoadError, match="is missing"):
        load_class(replace(parsed(json.dumps(form)), python="2.7"))


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"artifacts": "sha256:" + "0" * 64}, "'logitship.artifacts' is not a list of at most 100 digests"),
        ({"artifacts": ["sha256:" + "0" * 64] * 101}, "'logitship.artifacts' is not a list of at most 100 digests"),
        ({"artifacts": ["sha256:0"]}, "'logitship.artifacts' has an entry that is not"),
        ({"artifacts": [3]}, "'logitship.artifacts' has an entry that is not"),
        ({"source": "x", "name": "A", "shared": "1"}, "'logitship.shared' is not a text of offsets and lengths"),
        ({"source": "x", "name": "A", "shared": "0:1 0:1"}, "'logitship.shared' has more bytes than 'callable'"),
        ({"source": "x", "name": "A", "shared": 3}, "'shared' is missing, empty or not a string"),
        ({"source": "x", "name": "A", "shared": " ".join(["0:0"] * 101)}, "'logitship.shared' has more than 100 parts"),
    ],
)
def test_malformed_strings(about: dict[str, Any], message: str) -> None:
    with pytest.raises(ProcessorLoadError, match=message):
        parse(json.dumps({"callable": "80", "logitship": {"v": 1, **about}}))


def test_null_is_no_artifact() -> None:
    about = {"v": 1, "source": "x", "name": "A", "shared": None, "artifacts": None}
    string = parsed(json.dumps({"callable": "80", "logitship": about}))
    assert string.source is not None
    assert (string.artifacts, string.source.artifacts) == ((), ())


@pytest.mark.parametrize("data", [torch.tensor([[1.0, 2.0]]), np.array([1.0, 2.0], np.float32), b"\0\0\x80?\0\0\0@"])
def test_raw_bytes(data: Any) -> None:
    assert raw_bytes(data) == b"\0\0\x80?\0\0\0@"
    assert Artifact.of(raw_bytes(data)) == Artifact(digest_of(b"\0\0\x80?\0\0\0@"))


def test_raw_bytes_of_other_objects_are_refused() -> None:
    for data in ("text", [1.0], torch.ones(1).to_sparse()):
        with pytest.raises(TypeError, match="data: expected a"):
            raw_bytes(data)
