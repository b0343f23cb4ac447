"""Processors registered with the engine and requested by name, version or digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.builtin_processors import DisallowedTokensLogitsProcessor
from logitship.client.records import Receipt
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.loading import load_class
from logitship.client.serialization.processor_string import (
    PYTHON,
    InstalledProcessor,
    LineRange,
    Listing,
    PickledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
    parse,
)
from logitship.client.serialization.serialize import serialize
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.processors.registered_processors import RegisteredProcessors
from logitship.server.processors.registration import Upload
from logitship.server.refusals import BadRequest, Forbidden, NotFound, ServiceUnavailable
from logitship.server.requests.messages import GenerationChunk, GenerationRequest, GenerationStream, ProcessorRequest
from tests.helpers.engine_requests import BuildEngine, Output, generate
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import BOOST


class Ban(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        logits[:, 0] = -float("inf")
        return logits


PLAIN = parse(Ban.to_str())
assert isinstance(PLAIN, PickledProcessor)
assert PLAIN.listing is not None


request = partial(any_request, prompt=[10, 11], max_tokens=3, temperature=0)


def variant(number: int) -> SourceProcessor:
    """Return the same processor with another digest."""
    return SourceProcessor(f"{BOOST.source}\n# {number}", "Boost")


async def generate_with(engine: AsyncEngine, string: ProcessorString, params: dict[str, Any]) -> Output:
    """Generate three tokens with a processor."""
    return await generate(engine, request(processors=[(string, params)]))


async def register(engine: AsyncEngine, string: ProcessorString) -> str:
    """Register a processor, and return its digest."""
    digest = (await engine.register(string)).digest
    assert digest is not None
    return digest


async def test_request_by_digest(make_engine: BuildEngine) -> None:
    engine = make_engine()
    registered = await engine.register(BOOST)
    digest = BOOST.digest
    assert (registered.digest, registered.id) == (digest, "Boost@1")
    assert engine.processors.ships_code(RegisteredProcessor(digest), "")
    output = await generate_with(engine, RegisteredProcessor(digest), {"token_id": 42})
    assert output.token_ids == [42, 42, 42]
    (receipt,) = output.receipts
    assert (receipt.digest, receipt.name, receipt.steps) == (digest, "Boost", 3)


async def test_registering_again_changes_nothing(make_engine: BuildEngine) -> None:
    engine = make_engine()
    answers = await asyncio.gather(*(engine.register(BOOST) for _ in range(5)))
    assert {(each.digest, each.id) for each in answers} == {(BOOST.digest, "Boost@1")}
    assert engine.stats().processor_cache_misses == 1
    await generate_with(engine, BOOST, {"token_id": 1})
    assert engine.stats().processor_cache_misses == 1


async def test_registration_outlives_its_loaded_processor(make_engine: BuildEngine) -> None:
    engine = make_engine()
    await engine.register(BOOST)
    assert await engine.flush_cache()
    assert engine.stats().processor_cache_entries == 0
    output = await generate_with(engine, RegisteredProcessor(BOOST.digest), {"token_id": 42})
    assert output.token_ids == [42, 42, 42]


async def test_digest_is_that_of_the_code_that_runs(make_engine: BuildEngine) -> None:
    """A pickle of another Python version runs from its source, so the source is registered."""
    source = replace(BOOST, python="3.1")
    string = PickledProcessor(b"another Python's", python="3.1", source=source, name="Claimed")
    engine = make_engine()
    registered = await engine.register(string)
    assert (registered.digest, registered.name, registered.form) == (BOOST.digest, "Boost", "source")
    with pytest.raises(BadRequest, match=f"no processor {string.digest} is registered"):
        await generate_with(engine, RegisteredProcessor(string.digest), {})


@pytest.mark.parametrize(
    "limits", [{"processor_cache_entries": 2}, {"processor_cache_bytes": 2 * len(BOOST.source) + 20}]
)
async def test_evicted_registration_is_refused(make_engine: BuildEngine, limits: dict[str, int]) -> None:
    engine = make_engine(**limits)
    digests = [await register(engine, variant(number)) for number in range(2)]
    await generate_with(engine, RegisteredProcessor(digests[0]), {"token_id": 4})
    digests.append(await register(engine, variant(2)))
    for digest in (digests[0], digests[2]):
        assert (await generate_with(engine, RegisteredProcessor(digest), {"token_id": 42})).token_ids == [
            42,
            42,
            42,
        ]
    with pytest.raises(BadRequest, match=r"evicted to make space for others\. Register it again") as refused:
        await generate_with(engine, RegisteredProcessor(digests[1]), {"token_id": 42})
    assert refused.value.param == "processors[0]"
    await engine.register(variant(1))
    assert (await generate_with(engine, RegisteredProcessor(digests[1]), {"token_id": 42})).token_ids == [
        42,
        42,
        42,
    ]


async def test_load_error_registers_nothing(make_engine: BuildEngine) -> None:
    broken = SourceProcessor("raise RuntimeError('broken')", "Boost")
    engine = make_engine()
    for string in (broken, PickledProcessor(b"no pickle"), InstalledProcessor("nothing")):
        with pytest.raises(BadRequest) as refused:
            await engine.register(string)
        assert refused.value.param is None
    with pytest.raises(BadRequest, match="is registered"):
        await generate_with(engine, RegisteredProcessor(broken.digest), {})
    with pytest.raises(BadRequest, match="installed or registered as 'Boost'") as refused:
        await generate_with(engine, InstalledProcessor("Boost"), {})
    assert refused.value.param == "processors[0]"
    await engine.register(BOOST)


async def test_register_installed_processor_by_reference(make_engine: BuildEngine) -> None:
    """It ships no code, so its digest needs no flag either."""
    string = parse(DisallowedTokensLogitsProcessor.to_str())
    engine = make_engine()
    digest = await register(engine, string)
    assert engine.processors.list_all("")[-1].id == "disallowed_tokens@1"
    assert not engine.processors.ships_code(RegisteredProcessor(digest), "")
    plain = (await generate_with(engine, RegisteredProcessor(digest), {"token_ids": []})).token_ids
    output = await generate_with(engine, RegisteredProcessor(digest), {"token_ids": plain})
    assert not set(output.token_ids) & set(plain)
    assert [receipt.digest for receipt in output.receipts] == [digest]
    with pytest.raises(BadRequest) as refused:
        await generate_with(engine, RegisteredProcessor(digest), {"token_ids": "all"})
    assert refused.value.param == "processors[0].params"


async def test_engine_that_shuts_down_registers_nothing(make_engine: BuildEngine) -> None:
    engine = make_engine()
    await engine.shutdown(1)
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        await engine.register(BOOST)


# --- versions ---


def gated(token_id: int, gate: Path) -> SourceProcessor:
    """Return a processor that forces one token, from the third call on only once the file `gate` exists."""
    return SourceProcessor(
        f"""
import pathlib, time
from logitship import CustomLogitProcessor

class Gated(CustomLogitProcessor):
    '''Forces a token.

    More details.'''
    params_schema = {{"type": "object"}}

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            while len(params["__req__"].output_ids) >= 2 and not pathlib.Path({str(gate)!r}).exists():
                time.sleep(0.002)
            row[{token_id}] += 1000.0
        return logits
""",
        "Gated",
    )


async def test_running_requests_keep_their_version(make_engine: BuildEngine, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first, second = gated(41, gate), gated(42, gate)
    engine = make_engine()
    assert (await engine.register(first)).id == "Gated@1"
    names = ("Gated", "Gated@1", first.digest)
    streams = [await stream_of(engine, name, f"r{index}") for index, name in enumerate(names)]
    running = [aiter(stream) for stream in streams]
    begun = (await anext(running[0])).token_ids  # it runs and cannot end; the others run or wait
    assert engine.processors.delete("Gated", "") == ["Gated@1"]
    assert (await engine.register(second)).id == "Gated@2"
    newer = aiter(await stream_of(engine, "Gated", "newer"))
    with pytest.raises(BadRequest, match=r"Gated@1 is not registered any more: .*Registered are: Gated@2"):
        await stream_of(engine, "Gated@1", "refused")
    gate.touch()
    for index, chunks in enumerate(running):
        tokens, receipt = await rest(chunks)
        assert (tokens if index else begun + tokens) == [41] * 5
        assert (receipt.digest, receipt.steps) == (first.digest, 5)
    tokens, receipt = await rest(newer)
    assert (tokens, receipt.digest) == ([42] * 5, second.digest)


async def stream_of(engine: AsyncEngine, name: str, rid: str) -> GenerationStream:
    """Submit a request for five tokens with a registered processor."""
    string = RegisteredProcessor(name) if name.startswith("sha256:") else InstalledProcessor(name)
    return await engine.submit(request(rid, processors=[(string, None)], max_tokens=5))


async def rest(chunks: AsyncIterator[GenerationChunk]) -> tuple[list[int], Receipt]:
    """Return the remaining tokens of a stream, and its receipt."""
    left = Output([chunk async for chunk in chunks])
    (receipt,) = left.receipts
    return left.token_ids, receipt


async def test_pins_resolve_a_batch_to_one_version(make_engine: BuildEngine) -> None:
    def batch(rid: str) -> GenerationRequest:
        return request(rid, processors=[(InstalledProcessor("Boost"), None), (BOOST, None)])

    engine = make_engine()
    pins: dict[ProcessorString, ProcessorString] = {}
    await engine.register(variant(1))
    first = engine.processors.pin(batch("one"), pins)
    await engine.register(variant(2))
    assert engine.processors.pin(batch("two"), pins).processors == first.processors
    assert first.processors == (ProcessorRequest(variant(1)), ProcessorRequest(BOOST))
    assert engine.processors.pin(batch("three"), {}).processors[0] == ProcessorRequest(variant(2))
    engine.processors.delete("Boost", "")
    with pytest.raises(BadRequest, match="Boost is not registered any more") as refused:
        engine.processors.pin(batch("four"), {})
    assert refused.value.param == "processors[0]"


async def test_descriptions(make_engine: BuildEngine, tmp_path: Path) -> None:
    string = gated(41, tmp_path)
    engine = make_engine()
    known = len(engine.processors.list_all(""))
    info = await engine.register(string, "one", name="Short")
    assert (info.id, info.kind, info.name, info.version, info.form) == (
        "Short@1",
        "registered",
        "Short",
        1,
        "source",
    )
    assert (info.description, info.params_schema) == ("Forces a token.", {"type": "object"})
    assert (info.size, info.is_mask, info.python) == (len(string.source) + len("Forces a token.") + 17, False, None)
    assert engine.processors.list_all("one")[known:] == [info]
    assert len(engine.processors.list_all("two")) == known
    details = engine.processors.details("Short", "one")
    assert (details.source, details.class_name, details.source_note) == (string.source, "Gated", None)
    assert engine.processors.details(string.digest, "one") == engine.processors.details("Short@1", "one") == details
    for reference in ("Short", "Short@1", string.digest):
        for ask in (engine.processors.details, engine.processors.delete):
            with pytest.raises(NotFound, match="installed or registered as") as missing:
                ask(reference, "two")
            assert missing.value.param == "id"
    with pytest.raises(Forbidden, match="only the server's operator"):
        engine.processors.delete("disallowed_tokens", "one")
    assert engine.processors.delete(string.digest, "one") == ["Short@1"]
    with pytest.raises(NotFound, match="Short is not registered any more"):
        engine.processors.details("Short", "one")

    described = await engine.register(replace(PLAIN, name="Claimed"))
    assert (described.id, described.form, described.python) == ("Ban@1", "pickled", PYTHON)
    details = engine.processors.details("Ban", "")
    assert "class Ban" in str(details.source)
    assert details.source_note == "according to the processor string: what runs is the pickle next to it"
    listed = await engine.register(replace(PLAIN, source=None), name="Listed")
    details = engine.processors.details(listed.id, "")
    assert (details.source, details.class_name) == (PLAIN.listing.text, "Ban")
    assert str(details.source_note).startswith("it does not run")
    bare = await engine.register(PickledProcessor(PLAIN.payload), name="Bare")
    details = engine.processors.details(bare.id, "")
    assert (details.source, details.source_note) == (None, "the processor string holds a pickle and no source")
    installed = await engine.register(parse(DisallowedTokensLogitsProcessor.to_str()), name="Alias")
    details = engine.processors.details(installed.id, "")
    assert (details.form, details.source) == ("installed", None)


async def test_invalid_name_is_refused_as_a_field(make_engine: BuildEngine) -> None:
    engine = make_engine()
    foreign = SourceProcessor(BOOST.source.replace("Boost", "Größe"), "Größe")
    for string, name in ((BOOST, "a b"), (BOOST, "disallowed_tokens"), (foreign, None)):
        with pytest.raises(BadRequest, match=r"^name: ") as refused:
            await engine.register(string, name=name)
        assert refused.value.param == "name"


async def test_full_registry_is_service_unavailable(make_engine: BuildEngine) -> None:
    engine = make_engine(processor_cache_entries=1)
    await engine.register(BOOST, "one")
    with pytest.raises(ServiceUnavailable, match="used by other API keys"):
        await engine.register(BOOST, "two")


# --- the string of a digest for other tenants ---

NEEDED, CONSTANT, OTHER = (Artifact.of(data) for data in (b"needed", b"constant", b"other"))
PICKLE = b"a pickle that reads " + NEEDED.digest.encode() + b" and has the text " + CONSTANT.digest.encode()
HONEST = PickledProcessor(
    PICKLE,
    python=PYTHON,
    name="Honest",
    listing=Listing("class Honest:\n", (LineRange("honest.py", 1, 1, 1),)),
    artifacts=(Artifact(NEEDED.digest),),
)


def uploaded(string: PickledProcessor | SourceProcessor, name: str = "P") -> Upload:
    return Upload(name, string.digest, string)


@pytest.mark.parametrize("order", [("honest", "false"), ("false", "honest")])
@pytest.mark.parametrize("artifacts", [(), (OTHER,), (Artifact(NEEDED.digest), OTHER)])
def test_other_tenants_string_is_its_code_alone(order: tuple[str, str], artifacts: tuple[Artifact, ...]) -> None:
    """Somebody else who has the digest registers it with false lines, and with artifacts that he deletes."""
    false = replace(
        HONEST,
        python="3.1",
        source=BOOST,
        params_schema={"required": ["x"]},
        name="False",
        listing=Listing("os.system('rm')\n", (LineRange("honest.py", 1, 1, 1),)),
        artifacts=artifacts,
    )
    registered = RegisteredProcessors(max_entries=9, max_bytes=10_000)
    for tenant in order:
        registered.add(uploaded(HONEST if tenant == "honest" else false, tenant), tenant)
    seen = registered.use_digest(HONEST.digest, "third").upload.string
    assert seen == PickledProcessor(PICKLE, artifacts=(Artifact(NEEDED.digest),))
    assert seen.digest == HONEST.digest
    assert registered.use_digest(HONEST.digest, "honest").upload.string is HONEST
    assert registered.use_digest(HONEST.digest, "false").upload.string is false


def test_other_tenants_source_has_its_shared_bytes() -> None:
    source = SourceProcessor("class P: ...", "P", PICKLE, python=PYTHON, artifacts=(NEEDED, OTHER))
    registered = RegisteredProcessors(max_entries=9, max_bytes=10_000)
    registered.add(uploaded(replace(source, artifacts=(Artifact(NEEDED.digest),))), "one")
    registered.add(uploaded(source), "two")
    seen = registered.use_digest(source.digest, "three").upload.string
    assert isinstance(seen, SourceProcessor)
    assert seen == replace(source, python=None, artifacts=(NEEDED,))
    assert seen.artifacts[0].content is NEEDED.content


def test_artifacts_of_a_real_class_are_found_in_its_pickle() -> None:
    table = torch.arange(100_000)

    class Reads(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return logits + table[0]

    string = serialize(Reads, artifact_size=1000)
    assert string.artifacts
    registered = RegisteredProcessors(max_entries=9, max_bytes=10_000_000)
    registered.add(uploaded(string), "one")
    seen = registered.use_digest(string.digest, "two").upload.string
    assert isinstance(seen, PickledProcessor)
    assert seen.artifacts == string.artifacts
    assert seen.listing is None
    assert load_class(seen).__name__ == "Reads"
