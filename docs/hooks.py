"""MkDocs hook: read the project URL from pyproject.toml, and point links to sources there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[)#])")


def project_urls() -> dict[str, str]:
    """Return `[project.urls]` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]


def on_config(config: Any) -> Any:
    """Set the addresses of the site and the repository."""
    urls = project_urls()
    config.site_url = urls["Documentation"]
    config.repo_url, config.repo_name = urls["Repository"], "Source code"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links to folders, and to files outside `docs/`, at the repository."""
    docs = Path(config.docs_dir)
    folder = (docs / page.file.src_uri).parent

    def repository_link(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        outside = target.is_relative_to(ROOT) and not target.is_relative_to(docs)
        if not target.exists() or not (outside or target.is_dir()):
            return match[1]
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{target.relative_to(ROOT)}"

    return LINK.sub(repository_link, markdown)
