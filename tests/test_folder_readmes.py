"""README.md of each large folder: short, and up to date with the folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = sorted(
    path for top in ("client", "sampler", "builtin_processors", "server") for path in (ROOT / top).rglob("README.md")
)
NOT_LISTED = {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: str(readme.parent.relative_to(ROOT)))
def test_readme_lists_the_modules_of_its_folder(readme: Path) -> None:
    text = readme.read_text()
    assert len(text.splitlines()) <= 25
    folder = readme.parent
    assert text.startswith(f"# {folder.relative_to(ROOT)}\n")
    named = set(re.findall(r"`(\w+\.py|\w+/)`", text))
    assert sorted(name for name in named if not (folder / name).exists()) == []
    modules = {path.name for path in folder.glob("*.py")} - NOT_LISTED
    assert sorted(modules - named) == []


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: str(readme.parent.relative_to(ROOT)))
def test_links_of_readme_exist(readme: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", readme.read_text())
    assert [link for link in links if not (readme.parent / link).exists()] == []
