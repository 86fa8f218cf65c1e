"""Hooks: links from these pages to files outside of this folder lead to the repository in the site."""

import posixpath
import re
from typing import Any

FILES = "https://github.com/pipeshard/pipeshard/blob/main/"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def outside(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        return found[0] if path.startswith("docs/") else f"]({FILES}{path})"

    return re.sub(r"\]\((\.\./[^)]+)\)", outside, markdown)
