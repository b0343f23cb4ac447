from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from logitship.client.errors import TransportError
from logitship.client.http.responses import read_response
from logitship.client.processor_info import (
    ProcessorDetails,
    ProcessorInfo,
    parse_deleted,
    parse_processor,
    parse_processors,
)

BAN = {"name": "ban", "description": "Bans.", "params_schema": {}, "is_mask": True}
MINE = ProcessorInfo(
    id="Mine@2", kind="registered", name="Mine", version=2, digest="sha256:00", form="source", size=3, created=5
)
DETAILS = ProcessorDetails(**vars(MINE), source="class Mine: ...", class_name="Mine", source_note="so it says")


def test_unknown_fields_are_ignored() -> None:
    assert parse_processors({"data": [{"object": "processor", "new": 1, **asdict(MINE)}]}) == [MINE]
    assert parse_processor({"object": "processor", "new": 1, **asdict(DETAILS)}) == DETAILS
    assert parse_deleted({"id": "Mine", "deleted": True, "ids": ["Mine@1", "Mine@2"]}) == ["Mine@1", "Mine@2"]


def test_server_without_registry() -> None:
    (ban,) = parse_processors({"data": [BAN]})
    assert ban == ProcessorInfo(id="ban", kind="installed", **BAN)
    assert (ban.version, ban.digest) == (None, None)


@pytest.mark.parametrize("parse", [parse_processors, parse_processor, parse_deleted])
@pytest.mark.parametrize("content", [b"[]", b"null", b"{}", b'{"data": [{}]}', b'{"data": 5, "ids": 5}'])
def test_malformed_response_is_transport_error(parse: Any, content: bytes) -> None:
    with pytest.raises(TransportError, match="the server's response is malformed"):
        read_response(content, parse)
