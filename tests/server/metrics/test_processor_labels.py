from __future__ import annotations

from logitship.server.metrics.processor_labels import ProcessorLabel, ProcessorLabels

INSTALLED = {"sha256:1": "grammar"}


def test_installed_processor_keeps_its_name() -> None:
    labels = ProcessorLabels(INSTALLED, most_names=0)
    assert labels.label("sha256:1", "any name") == ProcessorLabel("grammar", "installed")


def test_shipped_processor_with_installed_name() -> None:
    assert ProcessorLabels(INSTALLED).label("sha256:2", "grammar") == ProcessorLabel("grammar", "shipped")


def test_number_of_names_is_limited() -> None:
    labels = ProcessorLabels(INSTALLED, most_names=2)
    found = [labels.label(f"sha256:{name}", name).name for name in ("A", "B", "C", "A", "D", "B")]
    assert found == ["A", "B", "other", "A", "other", "B"]


def test_same_name_shares_a_label() -> None:
    labels = ProcessorLabels({}, most_names=1)
    assert labels.label("sha256:2", "A") is labels.label("sha256:3", "A")


def test_long_names_are_truncated() -> None:
    labels = ProcessorLabels({}, most_names=1)
    assert len(labels.label("sha256:2", "A" * 200).name) == 80
    assert labels.label("sha256:3", "A" * 300).name == "A" * 80
