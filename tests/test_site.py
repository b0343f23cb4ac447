"""The site that mkdocs builds from `docs/` is complete and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import logitship

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with `--strict`: no broken link or anchor, no page outside the navigation."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|iframe)\b[^>]* src="(?:https?:)?//|<link\b[^>]* href="(?:https?:)?//')
    assert [page.name for page in site.rglob("*.html") if loaded.search(page.read_text())] == []


def test_reference_has_every_public_name(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    described = set(re.findall(r'id="logitship\.(?:[\w.]*\.)?(\w+)"', pages))
    public = {name for name in dir(logitship) if name[0] != "_" and isinstance(getattr(logitship, name), type)}
    assert {"Client", "LLM", "ProcessorFault"} < public
    assert public - described == set()


def test_files_from_outside_docs_are_included(site: Path) -> None:
    assert 'href="repository/CONTRIBUTING.html' in (site / "architecture.html").read_text()
    assert 'href="../architecture.html#words"' in (site / "repository" / "CONTRIBUTING.html").read_text()
    assert (site / "repository" / "client" / "errors.py").read_text() == (ROOT / "client" / "errors.py").read_text()


def test_blocks_and_lists_render_as_on_code_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "<p>```" not in text, page
        assert re.search(r"<p>[^<]*\n- ", text) is None, page
