"""Artifacts of several tenants within bounds."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from functools import partial

import pytest

from logitship import ProcessorLoadError
from logitship.client.serialization.artifact import Artifact, digest_of
from logitship.server.processors.artifact_store import (
    ArtifactStore,
    ArtifactStoreFull,
    ArtifactTooLarge,
    StoredArtifact,
)
from tests.helpers.random_cases import random_seeds

OVERHEAD = 1 << 14
SPACE_FOR_THREE = 3 * (OVERHEAD + 100)


def data(number: int) -> bytes:
    return bytes([number]) * 100


def digests(store: ArtifactStore, tenant: str = "") -> set[str]:
    return {each.digest for each in store.list_own(tenant)}


def test_artifact_is_found_by_its_digest() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE, clock=lambda: 7.5)
    added = store.add(b"abc", "one")
    digest = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert added == StoredArtifact(digest, 3, 7) == store.find(digest, "one")
    assert store.add(b"abc", "one") == added
    assert store.list_own("one") == [added]
    (resolved,) = store.resolve([Artifact(digest)], "one")
    assert resolved.content is not None
    assert resolved.content.data == b"abc"


def test_other_tenants_may_use_a_digest_but_do_not_see_it() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    digest = store.add(b"abc", "one").digest
    assert store.find(digest, "two") is None
    assert store.list_own("two") == []
    assert not store.remove(digest, "two")
    assert store.resolve([Artifact(digest)], "two")[0].content is not None


def test_unknown_artifact_says_how_to_upload() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    with pytest.raises(ProcessorLoadError, match=r"sha256:0+ is missing: upload its bytes with POST /v1/artifacts"):
        store.resolve([Artifact("sha256:" + "0" * 64)])


def test_least_recently_used_artifact_is_evicted() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    first, second, third = (store.add(data(number)).digest for number in range(3))
    store.resolve([Artifact(first)])
    fourth = store.add(data(3)).digest
    assert digests(store) == {first, third, fourth}
    assert store.num_bytes == SPACE_FOR_THREE
    with pytest.raises(ProcessorLoadError, match=second):
        store.resolve([Artifact(second)])


def test_largest_user_loses_and_the_smaller_ones_do_not() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    one = [store.add(data(number), "one").digest for number in range(2)]
    two = store.add(data(9), "two").digest
    three = store.add(data(8), "three").digest
    assert (digests(store, "one"), digests(store, "two"), digests(store, "three")) == ({one[1]}, {two}, {three})
    with pytest.raises(ArtifactStoreFull, match=r"\(--artifact-cache-bytes\)"):
        store.add(bytes(SPACE_FOR_THREE - OVERHEAD), "one")
    assert digests(store, "one") == {one[1]}


def test_artifact_larger_than_the_store() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    kept = store.add(data(0)).digest
    with pytest.raises(ArtifactTooLarge, match=rf"{SPACE_FOR_THREE} bytes \(--artifact-cache-bytes\)"):
        store.add(bytes(SPACE_FOR_THREE - OVERHEAD + 1))
    assert digests(store) == {kept}
    largest = store.add(bytes(SPACE_FOR_THREE - OVERHEAD)).digest
    assert digests(store) == {largest}


def test_equal_bytes_of_two_tenants_take_space_once() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    digest = store.add(data(0), "one").digest
    store.add(data(0), "two")
    assert store.num_bytes == OVERHEAD + 100
    assert store.remove(digest, "one")
    assert store.resolve([Artifact(digest)], "one")[0].content is not None
    assert store.remove(digest, "two")
    assert store.num_bytes == 0


def test_bytes_that_a_loaded_class_uses_count_until_it_is_unloaded() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    digest = store.add(bytes(2 * OVERHEAD)).digest
    used = store.resolve([Artifact(digest)])
    assert store.remove(digest)
    assert store.num_bytes == 3 * OVERHEAD
    with pytest.raises(ArtifactStoreFull, match="loaded processors"):
        store.add(data(1))
    assert store.resolve([Artifact(digest)]) == used  # it is still in memory
    del used
    assert store.num_bytes == 0
    store.add(data(1))


def test_bytes_of_loaded_classes_are_their_tenants() -> None:
    """A tenant does not lose an artifact because another one's classes fill the store."""
    store = ArtifactStore(max_bytes=100 * OVERHEAD)
    digest = store.add(bytes(80 * OVERHEAD), "large").digest
    used = store.resolve([Artifact(digest)], "large")
    store.remove(digest, "large")
    small = store.add(bytes(12 * OVERHEAD), "small").digest
    with pytest.raises(ArtifactStoreFull) as raised:
        store.add(bytes(9 * OVERHEAD), "other")
    assert raised.value.tenants == ["large"]
    assert digests(store, "small") == {small}
    del used
    store.add(bytes(9 * OVERHEAD), "other")


def test_artifact_that_a_loaded_class_uses_is_not_evicted_in_vain() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    first, second = (store.add(data(number)).digest for number in range(2))
    used = store.resolve([Artifact(second)])
    store.resolve([Artifact(first)])  # more recently, but by no class that is still loaded
    third, fourth = (store.add(data(number)).digest for number in (2, 3))
    assert digests(store) == {second, third, fourth}
    assert used[0].content is not None


def test_other_tenants_cannot_keep_an_artifact_from_being_evicted() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    first, second, third = (store.add(data(number), "one").digest for number in range(3))
    store.resolve([Artifact(first)], "two")
    fourth = store.add(data(3), "one").digest
    assert digests(store, "one") == {second, third, fourth}


@random_seeds(20)
def test_totals_are_those_of_what_is_there(seed: int) -> None:
    generator = random.Random(seed)
    store = ArtifactStore(max_bytes=6 * (OVERHEAD + 100))
    tenants, used = ["one", "two", "three"], deque[tuple[Artifact, ...]]()
    for _ in range(300):
        tenant, number = generator.choice(tenants), generator.randrange(8)
        before = {name: digests(store, name) for name in tenants}
        match generator.randrange(4):
            case 0 | 1:
                try:
                    store.add(data(number), tenant)
                except ArtifactStoreFull:
                    assert {name: digests(store, name) for name in tenants} == before
            case 2:
                store.remove(digest_of(data(number)), tenant)
            case 3:
                with contextlib.suppress(ProcessorLoadError):
                    used.append(store.resolve([Artifact(digest_of(data(number)))], tenant))
        while len(used) > 4:
            used.popleft()
        there = set().union(*map(partial(digests, store), tenants), (each.digest for (each,) in used))
        assert store.num_bytes == len(there) * (OVERHEAD + 100) <= 6 * (OVERHEAD + 100)


def test_time_does_not_grow_with_the_number_of_artifacts() -> None:
    """As many as fit into 128 MiB."""
    store = ArtifactStore(max_bytes=1 << 27)
    started = time.process_time()
    for number in range(8_000):
        store.add(number.to_bytes(4, "little"))
    assert time.process_time() - started < 2


def test_class_may_not_use_more_than_a_sandbox_holds() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE, max_used=150)
    artifacts = [Artifact(store.add(data(number)).digest) for number in range(2)]
    assert store.resolve(artifacts[:1])
    with pytest.raises(ProcessorLoadError, match=r"have 200 bytes, more than the 150 .* \(--sandbox-memory\)"):
        store.resolve(artifacts)


def test_many_small_artifacts_fill_the_store() -> None:
    store = ArtifactStore(max_bytes=SPACE_FOR_THREE)
    for number in range(10):
        store.add(bytes([number]))
    assert len(store.list_own()) == 3
    assert digest_of(bytes([9])) in digests(store)
