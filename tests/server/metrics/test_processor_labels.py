from __future__ import annotations

from logitship.server.metrics.processor_labels import ProcessorLabel, ProcessorLabels

INSTALLED = {"sha256:1": "grammar"}


def test_installed_ones_have_their_names() -> None:
    labels = ProcessorLabels(INSTALLED, most_names=0)
    assert labels.of("sha256:1", "whatever it says") == ProcessorLabel("grammar", "installed")


def test_a_shipped_class_with_an_installed_ones_name_is_told_from_it() -> None:
    assert ProcessorLabels(INSTALLED).of("sha256:2", "grammar") == ProcessorLabel("grammar", "shipped")


def test_only_so_many_names() -> None:
    labels = ProcessorLabels(INSTALLED, most_names=2)
    found = [labels.of(f"sha256:{name}", name).name for name in ("A", "B", "C", "A", "D", "B")]
    assert found == ["A", "B", "other", "A", "other", "B"]


def test_digests_of_one_name_share_a_label() -> None:
    labels = ProcessorLabels({}, most_names=1)
    assert labels.of("sha256:2", "A") is labels.of("sha256:3", "A")


def test_long_names_are_cut_and_then_count_as_one() -> None:
    labels = ProcessorLabels({}, most_names=1)
    assert len(labels.of("sha256:2", "A" * 200).name) == 80
    assert labels.of("sha256:3", "A" * 300).name == "A" * 80
