from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from logitship.builtin_processors.registry import Registry, installed_processors
from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_string import InstalledProcessor, RegisteredProcessor, SourceProcessor, parse
from logitship.sampler.in_process_host import InProcessHost
from logitship.sampler.processor_cache import ProcessorCache, ProcessorCacheFull
from logitship.server.engine.callable_library import CallableLibrary
from logitship.server.engine.processor_library import ProcessorLibrary
from logitship.server.engine.registered_processors import RegisteredProcessors

NAME = "disallowed_tokens"
NewLibrary = Callable[..., ProcessorLibrary]


@pytest.fixture
def new_library() -> NewLibrary:
    def make(registry: Registry | None = None, max_entries: int = 2) -> ProcessorLibrary:
        host = InProcessHost(SGLANG_NAMES)
        cache = ProcessorCache(host, max_entries=max_entries, max_bytes=1 << 20)
        registered = RegisteredProcessors(max_entries=2, max_bytes=1 << 20)
        callables = CallableLibrary(None, None)
        return ProcessorLibrary(registry or installed_processors(), cache, host, 100, registered, callables)

    return make


def shipped(name: str) -> SourceProcessor:
    source = f"""
from logitship import CustomLogitProcessor

class {name}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits + 1
"""
    return SourceProcessor(source, name)


def test_an_installed_processor_by_name(new_library: NewLibrary) -> None:
    library = new_library()
    processor = library.acquire(InstalledProcessor(NAME), {"token_ids": [3]})
    assert processor.name == NAME
    assert type(processor.instance) is installed_processors().get(NAME)
    assert library.acquire(InstalledProcessor(NAME), {"token_ids": [4]}) is processor
    library.release(processor)
    library.release(processor)
    assert library.cache_stats().entries == 0


def test_its_parameters_are_checked(new_library: NewLibrary) -> None:
    with pytest.raises(ValueError, match="token id 100 is outside the vocabulary"):
        new_library().acquire(InstalledProcessor(NAME), {"token_ids": [100]})
    with pytest.raises(ValueError, match="token_ids: missing"):
        new_library().acquire(InstalledProcessor(NAME), None)


def test_an_unknown_name_lists_the_known_ones(new_library: NewLibrary) -> None:
    with pytest.raises(ProcessorLoadError, match=f"'nonsense'; installed are: .*{NAME}"):
        new_library().acquire(InstalledProcessor("nonsense"), None)


def test_an_unknown_digest(new_library: NewLibrary) -> None:
    with pytest.raises(ProcessorLoadError, match="is registered"):
        new_library().acquire(RegisteredProcessor(f"sha256:{'0' * 64}"), None)


def test_sglangs_reference_to_its_own_ships_no_code(new_library: NewLibrary) -> None:
    recorded = json.loads((Path(__file__).parents[2] / "data" / "sglang_strings.json").read_text())
    library = new_library()
    texts = [value for value in strings_in(recorded) if "callable" in value]
    by_reference = [parse(text) for text in texts if not library.ships_code(parse(text))]
    assert by_reference
    assert len(by_reference) < len(texts)
    processors = [library._load(string)[0] for string in by_reference]
    assert {processor.name for processor in processors} <= set(installed_processors())
    assert library.cache_stats().misses == 0


def strings_in(value: Any) -> list[str]:
    """Every string in a JSON document."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings_in(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings_in(item)]
    return [value] if isinstance(value, str) else []


def test_a_shipped_processor_goes_through_the_cache(new_library: NewLibrary) -> None:
    library = new_library(max_entries=1)
    assert library.ships_code(shipped("A"))
    processor = library.acquire(shipped("A"), None)
    with pytest.raises(ProcessorCacheFull):
        library.acquire(shipped("B"), None)
    library.release(processor)
    library.release(library.acquire(shipped("B"), None))
    assert library.cache_stats().evictions == 1
    library.clear()
    assert library.cache_stats().entries == 0


def test_one_that_is_shipped_under_an_installed_name_is_another(new_library: NewLibrary) -> None:
    library = new_library()
    installed = library.acquire(InstalledProcessor(NAME), {"token_ids": [3]})
    impostor = library.acquire(shipped(NAME), None)
    assert impostor.name == installed.name
    assert impostor.digest != installed.digest
    library.release(impostor)
    library.clear()
    assert library.cache_stats().entries == 0


def test_threads_that_come_together_get_the_same_installed_one(new_library: NewLibrary) -> None:
    together = threading.Barrier(2)
    base = installed_processors().get(NAME)

    class Slow(base):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            together.wait(60)  # both threads have found that it is not there

    library = new_library(Registry([Slow]))
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(library.acquire, InstalledProcessor(NAME), {"token_ids": [3]}) for _ in range(2)]
        first, second = (future.result() for future in futures)
    assert first is second
    library.release(first)
    library.release(second)
