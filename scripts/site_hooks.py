"""What mkdocs does to the pages of `docs/` beside turning them into HTML.

The pages are written to be read on a code host as well. Two things work there that mkdocs does not know:

- Links to files outside `docs/`, such as `../CONTRIBUTING.md`. Those files are put into the site: Markdown as pages,
  others as they are. A link that leads nowhere stays as it is, and `mkdocs build --strict` then stops at it.
- A word behind the language of a code block (```` ```bash no-run ````), which says what the tests do with it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
OUTSIDE = "repository"
"""Folder of the site that holds files from outside `docs/`."""

_LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)\s#]+)(?=[)#])")
_FENCE = re.compile(r"^(```\w+) (no-run|background)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that the pages link to, and those that they link to in turn."""
    pages = [file.src_uri for file in files.documentation_pages()]
    unread = [in_repository(uri) for uri in pages]
    while unread:
        path = unread.pop()
        for target in targets(path):
            uri = in_site(target)
            if uri.startswith(f"{OUTSIDE}/") and uri not in files.src_uris:
                files.append(
                    File.generated(config, uri, abs_src_path=str(ROOT / target), inclusion=InclusionLevel.NOT_IN_NAV)
                )
                if target.endswith(".md"):
                    unread.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links at the places that `on_files` gave to the files."""
    path = in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def in_page(match: re.Match[str]) -> str:
        target = target_of(match[0], path)
        return match[0] if target is None else posixpath.relpath(in_site(target), folder or ".")

    return _FENCE.sub(r"\1", _LINK.sub(in_page, markdown))


def targets(path: str) -> list[str]:
    """The files of the repository that a Markdown file links to."""
    links = _LINK.findall((ROOT / path).read_text())
    return [target for link in links if (target := target_of(link, path)) is not None]


def target_of(link: str, path: str) -> str | None:
    """The file of the repository that a link in `path` leads to; None if there is none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).is_file() else None


def in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else f"{OUTSIDE}/{path}"


def in_repository(uri: str) -> str:
    """The inverse of `in_site`."""
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"{DOCS}/{uri}"
