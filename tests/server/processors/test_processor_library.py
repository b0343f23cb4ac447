from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logitship.builtin_processors.registry import Registry, installed_processors
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.client.errors import ProcessorLoadError
from logitship.client.processor import CustomLogitProcessor
from logitship.client.processor_info import ProcessorInfo
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
    parse,
)
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_cache import ProcessorCache, ProcessorCacheFull
from logitship.sampler.processors.request_view import ModelView
from logitship.server.processors.artifact_store import ArtifactStore, ArtifactStoreFull
from logitship.server.processors.callable_library import CallableLibrary
from logitship.server.processors.params_checker import InvalidParams, ParamsChecker
from logitship.server.processors.processor_descriptions import installed_info
from logitship.server.processors.processor_library import (
    InvalidName,
    NotDeletable,
    ProcessorLibrary,
    ProcessorNotAllowed,
)
from logitship.server.processors.registered_processors import NotRegistered, RegisteredProcessors
from tests.helpers.processors import shipped as shipped_call

MODEL = ModelView(4, frozenset(), None)

NAME = "disallowed_tokens"
NewLibrary = Callable[..., ProcessorLibrary]


@pytest.fixture(scope="module")
def params_checker() -> Iterator[ParamsChecker]:
    checker = ParamsChecker()
    yield checker
    checker.close()


@pytest.fixture
def new_library(params_checker: ParamsChecker) -> NewLibrary:
    def make(
        registry: Registry | None = None,
        max_entries: int = 2,
        allowed_digests: frozenset[str] | None = None,
        artifacts: ArtifactStore | None = None,
        executor: InProcessExecutor | None = None,
    ) -> ProcessorLibrary:
        executor = executor or InProcessExecutor(SGLANG_NAMES, MODEL)
        cache = ProcessorCache(
            executor,
            max_entries=max_entries,
            max_bytes=1 << 20,
            resolve=lambda string, tenant: (
                string if artifacts is None else replace(string, artifacts=artifacts.resolve(string.artifacts, tenant))
            ),
            check_loaded=params_checker.check_schema,
        )
        registered = RegisteredProcessors(max_entries=4, max_bytes=1 << 20)
        callables = CallableLibrary(None, None)
        return ProcessorLibrary(
            registry or installed_processors(),
            cache,
            executor,
            ModelView(100, frozenset(), None),
            registered,
            callables,
            params_checker,
            allowed_digests,
            artifacts,
        )

    return make


class KeepingExecutor(InProcessExecutor):
    """Keeps the artifacts of the loaded classes, as sandboxes do."""

    def __init__(self) -> None:
        super().__init__(SGLANG_NAMES, MODEL)
        self.kept: dict[str, object] = {}

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        loaded = super().load(string, tenant)
        self.kept[loaded.digest] = string
        return loaded

    def unload(self, processor: LoadedProcessor) -> None:
        super().unload(processor)
        del self.kept[processor.digest]


def shipped(name: str) -> SourceProcessor:
    return shipped_call(name, "return logits + 1")


def register(library: ProcessorLibrary, string: ProcessorString, tenant: str, name: str | None = None) -> ProcessorInfo:
    """Register a processor, as `RequestProcessors.register` does."""
    found = library.find_to_register(string, tenant, name)
    processor = library.acquire(found, tenant)
    try:
        return library.add_registration(processor, found, tenant, name)
    finally:
        library.release(processor)


def test_installed_processor_by_name(new_library: NewLibrary) -> None:
    library = new_library()
    processor = library.acquire(InstalledProcessor(NAME), "")
    assert processor.name == NAME
    assert type(processor.instance) is installed_processors().get(NAME)
    assert library.acquire(InstalledProcessor(NAME), "") is processor
    library.release(processor)
    library.release(processor)
    assert library.cache_stats().entries == 0


def test_idle_classes_are_unloaded_for_an_artifact(new_library: NewLibrary) -> None:
    """An author who uploads new weights again and again never fills the store."""
    library = new_library(max_entries=9, artifacts=ArtifactStore(max_bytes=3 << 14), executor=KeepingExecutor())
    used = None
    for number in range(6):
        digest = library.add_artifact(bytes([number]) * 1000, "").digest
        processor = library.acquire(replace(shipped(f"A{number}"), artifacts=(Artifact(digest),)), "")
        if number:
            library.release(processor)
        else:
            used = processor
    assert library.cache_stats().entries == 2  # another one's bytes were freed for the last
    assert used is not None
    with pytest.raises(ArtifactStoreFull):
        library.add_artifact(bytes(20_000), "")
    library.release(used)
    library.add_artifact(bytes(20_000), "")


def test_params_of_installed_processors_are_checked(new_library: NewLibrary) -> None:
    library = new_library()
    processor = library.acquire(InstalledProcessor(NAME), "")
    assert library.prepare(processor, {"token_ids": [3]}).token_ids == [3]
    with pytest.raises(InvalidParams, match="token id 100 is outside the vocabulary"):
        library.prepare(processor, {"token_ids": [100]})
    with pytest.raises(InvalidParams, match="token_ids: missing"):
        library.prepare(processor, None)
    assert library.prepare(library.acquire(shipped(NAME), ""), None) is None


def test_unknown_own_params_are_refused(new_library: NewLibrary) -> None:
    library = new_library()
    processor = library.acquire(InstalledProcessor(NAME), "")
    library.prepare(processor, {"token_ids": [3], "other": 1})
    with pytest.raises(InvalidParams, match=r"^token_id: .* no such parameter, did you mean token_ids\?$"):
        library.prepare(processor, {"token_ids": [3], "token_id": 1}, own=True)
    with pytest.raises(InvalidParams, match=r"^x: disallowed_tokens has no such parameter: it takes token_ids$"):
        library.prepare(processor, {"x": 1}, own=True)


def test_installed_processors_are_listed_with_their_schema(new_library: NewLibrary) -> None:
    listed = {each.name: each for each in new_library().names.list_all("")}
    assert list(listed) == list(installed_processors())
    assert listed[NAME].description.startswith("Sets the logits of each request's `token_ids` to -inf")
    assert listed[NAME].params_schema == installed_processors().get(NAME).params_schema


def test_installed_processor_without_a_docstring_has_no_description() -> None:
    class Bare(CustomLogitProcessor):
        pass

    assert installed_info("bare", Bare).description == ""


def test_unknown_name_lists_the_known_ones(new_library: NewLibrary) -> None:
    with pytest.raises(ProcessorLoadError, match=f"'nonsense'; installed are: .*{NAME}"):
        new_library().acquire(InstalledProcessor("nonsense"), "")


def test_unknown_digest(new_library: NewLibrary) -> None:
    with pytest.raises(ProcessorLoadError, match="is registered"):
        new_library().acquire(RegisteredProcessor(f"sha256:{'0' * 64}"), "")


def test_sglang_reference_ships_no_code(new_library: NewLibrary) -> None:
    recorded = json.loads((Path(__file__).parents[2] / "data" / "sglang_strings.json").read_text())
    library = new_library()
    texts = [value for value in strings_in(recorded) if "callable" in value]
    by_reference = [parse(text) for text in texts if not library.ships_code(parse(text), "")]
    assert by_reference
    assert len(by_reference) < len(texts)
    processors = [library.acquire(string, "") for string in by_reference]
    assert {processor.name for processor in processors} <= set(installed_processors())
    assert library.cache_stats().misses == 0


def strings_in(value: Any) -> list[str]:
    """Return every string in a JSON document."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings_in(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings_in(item)]
    return [value] if isinstance(value, str) else []


def test_shipped_processors_are_cached(new_library: NewLibrary) -> None:
    library = new_library(max_entries=1)
    assert library.ships_code(shipped("A"), "")
    processor = library.acquire(shipped("A"), "")
    with pytest.raises(ProcessorCacheFull):
        library.acquire(shipped("B"), "")
    library.release(processor)
    library.release(library.acquire(shipped("B"), ""))
    assert library.cache_stats().evictions == 1
    library.clear()
    assert library.cache_stats().entries == 0


def test_shipped_class_with_an_installed_name_is_distinct(new_library: NewLibrary) -> None:
    library = new_library()
    installed = library.acquire(InstalledProcessor(NAME), "")
    impostor = library.acquire(shipped(NAME), "")
    assert impostor.name == installed.name
    assert impostor.digest != installed.digest
    library.release(impostor)
    library.clear()
    assert library.cache_stats().entries == 0


def test_concurrent_threads_get_the_same_installed_processor(new_library: NewLibrary) -> None:
    barrier = threading.Barrier(2)
    base = installed_processors().get(NAME)

    class Slow(base):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            barrier.wait(60)  # both threads have found that it is not loaded

    library = new_library(Registry([Slow]))
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(library.acquire, InstalledProcessor(NAME), "") for _ in range(2)]
        first, second = (future.result() for future in futures)
    assert first is second
    library.release(first)
    library.release(second)


def test_tenants_share_installed_processors_only(new_library: NewLibrary) -> None:
    library = new_library()
    one, two = (library.acquire(shipped("A"), tenant) for tenant in ("one", "two"))
    assert one.digest == two.digest
    assert type(one.instance) is not type(two.instance)
    assert library.acquire(shipped("A"), "one") is one
    installed = [library.acquire(InstalledProcessor(NAME), tenant) for tenant in ("one", "two")]
    assert installed[0] is installed[1]
    for processor in (one, one, two, *installed):
        library.release(processor)
    library.clear()
    assert library.cache_stats().entries == 0


def test_registered_string_is_loaded_for_each_tenant(new_library: NewLibrary) -> None:
    library = new_library()
    register(library, shipped("A"), "one")
    by_digest = RegisteredProcessor(shipped("A").digest)
    one, two = (library.acquire(by_digest, tenant) for tenant in ("one", "two"))
    assert one.digest == two.digest == by_digest.digest
    assert (one.tenant, two.tenant) == ("one", "two")
    assert library.acquire(InstalledProcessor("A"), "one") is one
    with pytest.raises(NotRegistered, match="installed or registered as 'A'"):
        library.acquire(InstalledProcessor("A"), "two")


def test_name_resolves_to_its_newest_version(new_library: NewLibrary) -> None:
    library = new_library()
    first, second = shipped("A"), replace(shipped("A"), source=shipped("A").source + "# more")
    assert register(library, first, "").id == "A@1"
    resolved = library.names.resolve(InstalledProcessor("A"), "")
    assert register(library, second, "").id == "A@2"
    assert register(library, first, "").id == "A@1"
    assert register(library, first, "", "Other").id == "Other@1"
    assert resolved == library.names.resolve(InstalledProcessor("A@1"), "") == first
    assert library.names.resolve(InstalledProcessor("A"), "") == second
    assert library.names.resolve(first, "") is first
    loaded = library.acquire(InstalledProcessor("A"), "")
    assert loaded.digest == second.digest
    assert library.names.delete("A", "") == ["A@1", "A@2"]
    library.release(loaded)
    for gone in (InstalledProcessor("A"), InstalledProcessor("A@2"), RegisteredProcessor(second.digest)):
        with pytest.raises(NotRegistered, match="deleted, or evicted to make space"):
            library.acquire(gone, "")
        assert library.names.find(gone, "") is gone


def test_ships_code(new_library: NewLibrary) -> None:
    library = new_library()
    register(library, shipped("A"), "one")
    register(library, InstalledProcessor(NAME), "one", "Alias")
    for string in (InstalledProcessor("A"), InstalledProcessor("A@1"), RegisteredProcessor(shipped("A").digest)):
        assert library.ships_code(string, "one")
    for string in (InstalledProcessor("Alias"), InstalledProcessor(NAME), InstalledProcessor("nothing")):
        assert not library.ships_code(string, "one")
    assert not library.ships_code(InstalledProcessor("A"), "two")
    assert library.acquire(InstalledProcessor("Alias"), "one") is library.acquire(InstalledProcessor(NAME), "two")


@pytest.mark.parametrize(
    ("string", "name", "expected"),
    [
        (shipped("A"), "a b", "'a b' is not a name for a registered processor, which has a letter"),
        (shipped("A"), "A@1", "'A@1' is not a name"),
        (shipped("A"), "", "'' is not a name"),
        (shipped("Größe"), None, "'Größe' is not a name"),
        (shipped("A"), NAME, f"'{NAME}' is the name of an installed processor"),
        (shipped(NAME), None, f"'{NAME}' is the name of an installed processor"),
        (InstalledProcessor("grammar"), NAME, f"'{NAME}' is the name of an installed processor"),
    ],
)
def test_unusable_name_is_refused(
    string: ProcessorString, name: str | None, expected: str, new_library: NewLibrary
) -> None:
    library = new_library()
    with pytest.raises(InvalidName, match=expected):
        register(library, string, "", name)
    assert [each.kind for each in library.names.list_all("")] == ["installed"] * len(installed_processors())
    library.clear()
    assert library.cache_stats().entries == 0  # nothing is in use


def test_invalid_name_is_refused_before_the_code_runs(new_library: NewLibrary) -> None:
    library = new_library()
    with pytest.raises(InvalidName):
        register(library, shipped("A"), "", "a b")
    assert library.cache_stats().misses == 0


def test_installed_processor_keeps_its_name(new_library: NewLibrary) -> None:
    library = new_library()
    assert register(library, InstalledProcessor(NAME), "").id == f"{NAME}@1"
    register(library, parse(installed_processors().get(NAME).to_str()), "")
    assert [each.id for each in library.names.list_all("") if each.name == NAME] == [NAME, f"{NAME}@1"]
    installed = library.acquire(InstalledProcessor(NAME), "")
    assert library.acquire(InstalledProcessor(f"{NAME}@1"), "") is installed
    assert library.names.delete(NAME, "") == [f"{NAME}@1"]
    digest = library.names.details(NAME, "").digest
    assert digest is not None
    for reference in (NAME, digest):
        assert library.names.details(reference, "").kind == "installed"
        with pytest.raises(NotDeletable, match=f"{NAME} is installed"):
            library.names.delete(reference, "")


ANOTHER_PYTHON = PickledProcessor(b"not read", python="3.1", source=shipped("A"))


@pytest.mark.parametrize("string", [shipped("A"), ANOTHER_PYTHON])
def test_only_allowed_digests_are_loaded(string: ProcessorString, new_library: NewLibrary) -> None:
    library = new_library(allowed_digests=frozenset({shipped("A").digest}))
    library.release(library.acquire(string, ""))
    registered = register(library, string, "")
    assert registered.digest == shipped("A").digest
    for name in (RegisteredProcessor(registered.digest), InstalledProcessor("A"), InstalledProcessor("A@1")):
        library.release(library.acquire(name, ""))
    for use in (partial(register, library), lambda string, tenant: library.acquire(string, tenant)):
        with pytest.raises(ProcessorNotAllowed, match=rf"the processor {shipped('B').digest} .*--allow-processor"):
            use(shipped("B"), "")
    assert library.cache_stats().misses == 1


def test_allow_list_checks_the_code_that_runs(new_library: NewLibrary) -> None:
    """The pickle is allowed, but the server runs the source in the string."""
    harmless = PickledProcessor(b"harmless", python="3.1", source=shipped("A"))
    library = new_library(allowed_digests=frozenset({harmless.digest}))
    for string in (harmless, replace(harmless, source=shipped("B"))):
        with pytest.raises(ProcessorNotAllowed, match="sha256:"):
            library.acquire(string, "")
    assert library.cache_stats().misses == 0


def test_installed_processors_are_always_allowed(new_library: NewLibrary) -> None:
    library = new_library(allowed_digests=frozenset())
    installed = library.acquire(InstalledProcessor(NAME), "")
    by_reference = library.acquire(parse(installed_processors().get(NAME).to_str()), "")
    assert by_reference is installed
    with pytest.raises(ProcessorNotAllowed):
        library.acquire(shipped("A"), "")


def with_schema(schema: str) -> SourceProcessor:
    source = shipped("Counts").source.replace("    def", f"    params_schema = {schema}\n\n    def", 1)
    return SourceProcessor(source, "Counts")


def test_params_are_checked_against_the_schema(new_library: NewLibrary) -> None:
    library = new_library()
    string = with_schema("{'properties': {'sentences': {'type': 'integer', 'minimum': 1}}, 'required': ['sentences']}")
    info = register(library, string, "a")
    for form in (string, RegisteredProcessor(info.digest), InstalledProcessor("Counts")):
        processor = library.acquire(form, "a")
        library.prepare(processor, {"sentences": 1}, tenant="a")
        for params, problem in [
            (None, "params: 'sentences' is a required property"),
            ({"sentences": "two"}, "params.sentences: 'two' is not of type 'integer'"),
            ({"sentences": 0}, "params.sentences: 0 is less than the minimum of 1"),
        ]:
            with pytest.raises(InvalidParams) as raised:
                library.prepare(processor, params, tenant="a")
            assert str(raised.value) == problem


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{'requird': ['a']}", "params_schema: 'requird' is not a keyword of JSON Schema"),
        ("{'$ref': 'https://example.com/schema'}", "only references into the schema itself"),
        ("{'pattern': '('}", "params_schema.pattern: '(' is not a 'regex'"),
        ("['a']", "params_schema is not a JSON object"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused(new_library: NewLibrary, schema: str, reason: str) -> None:
    library = new_library(max_entries=1)
    for _ in range(2):
        with pytest.raises(ProcessorLoadError) as raised:
            library.acquire(with_schema(schema), "")
        assert reason in str(raised.value)
    assert library.cache_stats().entries == 0


def test_params_of_an_installed_class_are_checked(new_library: NewLibrary) -> None:
    class Counts(CustomLogitProcessor):
        params_schema = {"required": ["sentences"]}  # noqa: RUF012

        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return logits

    registry = installed_processors()
    registry.add("counts", Counts)
    library = new_library(registry)
    processor = library.acquire(InstalledProcessor("counts"), "")
    with pytest.raises(InvalidParams, match=r"^params: 'sentences' is a required property$"):
        library.prepare(processor, {})
