"""Artifacts of several tenants within bounds."""

from __future__ import annotations

import pytest

from logitship import ProcessorLoadError
from logitship.client.serialization.artifact import Artifact, digest_of
from logitship.server.processors.artifact_store import ArtifactStore, ArtifactStoreFull, StoredArtifact

OVERHEAD = 1 << 10
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
    with pytest.raises(ProcessorLoadError, match=r"sha256:0+ is not here: upload its bytes with POST /v1/artifacts"):
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
        store.add(bytes(SPACE_FOR_THREE), "one")
    assert digests(store, "one") == {one[1]}


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
