from __future__ import annotations

from typing import Any

import pytest

from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.server.processors.request_processors import read_entries
from logitship.server.refusals import BadRequest, RequestTooLarge
from logitship.server.requests.messages import CallableRequest, ProcessorRequest

AT = "logits_processors"
SOURCE = {"source": "class P: ...", "class_name": "P"}


def read(*entries: Any, **options: Any) -> tuple[Any, ...]:
    return read_entries(entries, AT, **({"max_processor_size": 1000} | options))


def test_all_kinds_of_entries() -> None:
    first, second, third, fourth = read(
        {"processor": SOURCE, "params": {"a": 1}},
        {"qualname": "zoo.Cite", "args": [1], "kwargs": {"boost": 2.0}},
        "zoo.cite",
        {"processor": '{"name": "disallowed_tokens"}'},
    )
    assert first == ProcessorRequest(SourceProcessor("class P: ...", "P"), {"a": 1}, own=True)
    assert second == CallableRequest("zoo.Cite", (1,), {"boost": 2.0})
    assert third == CallableRequest("zoo.cite")
    assert fourth == ProcessorRequest(InstalledProcessor("disallowed_tokens"), None)


def test_missing_params_default_to_those_of_the_request() -> None:
    shared = {"a": 1}
    own, left_out, null = read(
        {"processor": SOURCE, "params": {}},
        {"processor": SOURCE},
        {"processor": SOURCE, "params": None},
        params=shared,
    )
    assert (own.params, left_out.params, null.params) == ({}, shared, shared)
    assert left_out.params is shared  # the same object, so that it is checked and prepared once


@pytest.mark.parametrize(
    ("entry", "at", "reason"),
    [
        (5, "", "must be an object with 'processor' or 'qualname'"),
        (None, "", "must be an object"),
        ([], "", "must be an object"),
        ({}, "", "has neither 'processor' nor 'qualname'"),
        ({"processor": None}, "", "has neither"),
        ({"processor": SOURCE, "param": {}}, "", "unknown key 'param'"),
        ({"processor": SOURCE, "qualname": "a.b"}, "", "unknown key 'processor'; the keys are qualname"),
        ({"processor": SOURCE, "params": []}, ".params", "must be an object"),
        ({"processor": SOURCE, "params": {"__req__": 1}}, ".params", "the server's own"),
        ({"processor": 5}, ".processor", "must be a processor string"),
        ({"processor": "nonsense"}, ".processor", "not JSON"),
        ({"processor": {"callable": "zz"}}, ".processor", "hexadecimal"),
        ({"qualname": 5}, ".qualname", "must be the qualified name"),
        ({"qualname": ""}, ".qualname", "must be the qualified name"),
        ({"qualname": "a.b", "args": {}}, ".args", "must be a list"),
        ({"qualname": "a.b", "kwargs": []}, ".kwargs", "must be an object"),
        ({"qualname": "a.b", "params": {}}, "", "unknown key 'params'"),
        ("", "", "must be the qualified name"),
        ('{"name": "disallowed_tokens"}', "", "goes into an object's 'processor'"),
    ],
)
def test_malformed_entries(entry: Any, at: str, reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read("a.b", entry)
    assert caught.value.param == f"{AT}[1]{at}"
    assert caught.value.message.startswith(f"{AT}[1]{at}: ")
    assert reason in caught.value.message


def test_processor_string_over_the_limit() -> None:
    with pytest.raises(RequestTooLarge) as caught:
        read({"processor": SOURCE}, max_processor_size=10)
    assert caught.value.param == f"{AT}[0].processor"
