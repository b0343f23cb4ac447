from __future__ import annotations

import pytest

from logitship.server.tokenizer import Tokenizer

from .promised_corpus import ROOT, Case, Coverage, cases, coverage, share_without_reads, table

EXAMPLES = frozenset({"SGLang", "logits-processor-zoo", "cookbook", "playground"})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return list(cases(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def covered(corpus: list[Case], tokenizer: Tokenizer) -> list[Coverage]:
    return [coverage(case, tokenizer.hf_tokenizer) for case in corpus]


@pytest.mark.slow
def test_most_examples_never_read(covered: list[Coverage]) -> None:
    assert share_without_reads(covered, EXAMPLES) >= 0.75


@pytest.mark.slow
def test_only_classes_that_should_raise(covered: list[Coverage]) -> None:
    """The others are compared by their results."""
    raised = {each.name for each in covered if each.num_raised}
    assert raised == {
        "Broken",
        "contract: Raises",
        "environment: OnlyAlone",
        "real_engine: Misspells",
    }


@pytest.mark.slow
def test_page_lists_who_reads(covered: list[Coverage]) -> None:
    """If it fails, replace the table of the page by the printed one."""
    found = table([each for each in covered if each.corpus != "tests"])
    print(*found, sep="\n")
    lines = (ROOT / "docs" / "reading-logits.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == found


@pytest.mark.slow
def test_same_results_if_values_are_used_at_once(corpus: list[Case], tokenizer: Tokenizer) -> None:
    for case in corpus:
        coverage(case, tokenizer.hf_tokenizer, read_first=True)
