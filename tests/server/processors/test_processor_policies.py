"""Processors of every request: they run after its own, whoever sends it, and no client can leave them out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from logitship.builtin_processors import WatermarkKey, detect_watermark
from logitship.client.serialization.processor_string import SourceProcessor, to_text
from logitship.server.http.app import create_app
from logitship.server.processors.processor_library import ProcessorNotAllowed
from logitship.server.refusals import StartError
from logitship.server.requests.messages import ProcessorRequest
from tests.helpers.engine_requests import BuildEngine, generate, generate_together, installed
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import BAN, BOOST

request = partial(any_request, prompt=[10, 11], max_tokens=6, seed=5, temperature=0.0)
WriteString = Callable[..., str]


@pytest.fixture
def write_string(tmp_path: Path) -> WriteString:
    """Writes a class with parameters to a file, and returns its entry of `default_processor`."""

    def write(string: SourceProcessor, **params: Any) -> str:
        file = tmp_path / f"{string.class_name}.json"
        file.write_text(json.dumps({"processor": json.loads(to_text(string)), "params": params}))
        return f"{string.class_name}=@{file}"

    return write


async def test_installed_processor_runs_on_every_request(make_engine: BuildEngine) -> None:
    plain = await generate(make_engine(), request("plain"))
    banned = plain.token_ids[0]
    engine = make_engine(default_processor=f'disallowed_tokens={{"token_ids": [{banned}]}}')
    forces = installed("think_mode", max_thinking_tokens=1, end_think_token_ids=[banned])
    wanted = [request("plain"), request("other", processors=[installed("gen_length", boost_factor=0.0)])]
    for output, names in zip(
        await generate_together(engine, wanted),
        (["disallowed_tokens"], ["gen_length", "disallowed_tokens"]),
        strict=True,
    ):
        assert banned not in output.token_ids
        assert [receipt.name for receipt in output.receipts] == names
        assert {receipt.steps for receipt in output.receipts} == {6}
    # A mask of the operator's is one even for a processor that forces the token.
    assert (await generate(engine, request("forces", processors=[forces]))).error.type == "NoTokenLeftError"


async def test_several_run_in_order_after_those_of_the_request(
    make_engine: BuildEngine, write_string: WriteString
) -> None:
    """Each adds more than the one before it."""
    defaults = [write_string(BOOST, token_id=41, by=1e5), write_string(BAN, token_ids=[42])]
    engine = make_engine(default_processor=defaults)
    own = ProcessorRequest(BOOST, {"token_id": 42, "by": 1e7}, own=True)
    output = await generate(engine, request("own", processors=[own]))
    assert output.token_ids == [41] * 6
    assert [receipt.name for receipt in output.receipts] == ["Boost", "Boost", "Ban"]


@pytest.mark.slow
def test_class_runs_in_a_sandbox_where_clients_may_ship_none(
    make_engine: BuildEngine, write_string: WriteString
) -> None:
    engine = make_engine(
        default_processor=write_string(BOOST, token_id=41),
        enable_custom_logit_processor=False,
        processor_isolation="sandbox",
    )
    with TestClient(create_app(engine), base_url="http://localhost") as client:
        answer = client.post("/generate", json={"input_ids": [10], "sampling_params": {"max_new_tokens": 3}}).json()
        assert answer["output_ids"] == [41] * 3
        (receipt,) = answer["meta_info"]["receipts"]
        assert (receipt["name"], receipt["steps"]) == ("Boost", 3)
        for string in (BAN, BOOST):
            body = {"input_ids": [10], "custom_logit_processor": to_text(string)}
            refused = client.post("/generate", json=body)
            assert refused.status_code == 400
            assert "--enable-custom-logit-processor" in refused.text
    # Behind the routes, too, no other class may run.
    with pytest.raises(ProcessorNotAllowed):
        engine.processors._library.acquire(BAN, "")


async def test_class_need_not_be_on_the_list_of_allowed_ones(
    make_engine: BuildEngine, write_string: WriteString, tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(BAN.digest)
    engine = make_engine(default_processor=write_string(BOOST, token_id=41), allow_processor=str(allowed))
    own = ProcessorRequest(BAN, {"token_ids": [42]}, own=True)
    assert (await generate(engine, request("own", processors=[own]))).token_ids == [41] * 6


async def test_watermark_of_every_request(make_engine: BuildEngine, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"a secret of the operator\n")
    defaults = 'watermark_kgw={"bias": 5.0}'
    engine = make_engine(watermark_key_file=str(file), default_processor=defaults, max_model_len=400)
    grammar = installed("grammar", regex="[a-z ]{250}")
    wanted = [
        request("plain", max_tokens=200, temperature=1.0, ignore_eos=True),
        request("grammar", max_tokens=200, temperature=1.0, processors=[grammar]),
    ]
    for output in await generate_together(engine, wanted):
        assert len(output.token_ids) == 200
        found, other = (
            detect_watermark(output.token_ids, key, vocab_size=260)
            for key in (WatermarkKey(b"a secret of the operator"), WatermarkKey(b"a secret of another"))
        )
        assert found.p_value < 1e-6 < other.p_value


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nothing_such", "no processor is installed as 'nothing_such'|nothing_such"),
        ('disallowed_tokens={"token_ids": "x"}', "token_ids: expected a list of token ids, got 'x'"),
        ('disallowed_tokens={"token_id": [1]}', "token_ids: missing|disallowed_tokens has no such parameter"),
        ("watermark_kgw", "no watermark key: its operator sets one with --watermark-key-file"),
    ],
)
def test_errors_stop_the_start(entry: str, message: str, make_engine: BuildEngine) -> None:
    with pytest.raises(StartError, match=message):
        make_engine(default_processor=entry)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"name": "disallowed_tokens"}, "mine: the file has no class, but the name"),
        ({"digest": f"sha256:{'0' * 64}"}, "mine: the file has no class, but the name"),
        ({"processor": {"source": "1", "class_name": "A"}, "more": {}}, "mine: has an unknown key 'more'"),
        ({"source": "import", "class_name": "A"}, "a processor of every request cannot run: "),
        ([1], "mine.processor: must be a processor string"),
    ],
)
def test_file_without_a_class_stops_the_start(
    content: object, message: str, make_engine: BuildEngine, tmp_path: Path
) -> None:
    file = tmp_path / "entry.json"
    file.write_text(json.dumps(content))
    with pytest.raises(StartError, match=message):
        make_engine(default_processor=f"mine=@{file}")
