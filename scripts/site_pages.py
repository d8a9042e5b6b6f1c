"""MkDocs hooks: pages that lie outside `docs/`, and folders in the navigation.

README, CONTRIBUTING and CHANGELOG are pages of the site as they are in the repository; links
between them and the pages of `docs/` are rewritten, so that one source serves both.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository's root, and the pages that they are."""
FOLDER_PAGE = "README.md"
"""The page of a folder."""

_TARGET = re.compile(
    r"""(?P<before>\]\(|^\[[^\]]+\]:\s+|(?:src|href)=")(?P<path>[^)\s"#:]+)(?P<after>[)\s"#])""",
    re.MULTILINE,
)
"""The target of a link or picture, inline, by reference or in HTML; no URL, no anchor alone."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of folders into the navigation."""
    config.nav = _listed(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside `docs/`."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=linked(text, ".", ".", root)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of a page in `docs/` at the pages that lie outside."""
    if page.file.src_uri in PAGES.values():
        return markdown
    root = Path(config.config_file_path).parent
    folder = posixpath.dirname(page.file.src_uri)
    return linked(markdown, posixpath.join(DOCS, folder), folder or ".", root)


def linked(markdown: str, source: str, folder: str, root: Path) -> str:
    """Markdown whose links to files of the repository point at pages of the site.

    The text lies in the folder `source` of the repository, and in `folder` of the site. What is
    no page stays as it is, and is an error of a strict build.
    """

    def rewritten(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(source, found["path"]))
        page = PAGES.get(path)
        if page is None:
            if not path.startswith(f"{DOCS}/"):
                return found[0]
            if (root / path).is_dir():
                path = posixpath.join(path, FOLDER_PAGE)
            page = posixpath.relpath(path, DOCS)
        return f"{found['before']}{posixpath.relpath(page, folder)}{found['after']}"

    return _TARGET.sub(rewritten, markdown)


def _listed(nav: Any, docs: Path) -> Any:
    """A navigation in which folders are the lists of their pages, the folder's own first."""
    if isinstance(nav, list):
        return [_listed(entry, docs) for entry in nav]
    if isinstance(nav, dict):
        return {title: _listed(entry, docs) for title, entry in nav.items()}
    if not nav.endswith("/"):
        return nav
    pages = sorted((docs / nav).glob("*.md"), key=lambda p: (p.name != FOLDER_PAGE, p.name))
    return [page.relative_to(docs).as_posix() for page in pages]
