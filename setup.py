"""Setup: pyproject.toml has everything but the description on a package index, where relative links lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

PAGES = "https://github.com/pipeshard/pipeshard/blob/main/"
FILES = "https://raw.githubusercontent.com/pipeshard/pipeshard/main/"


def absolute(text: str) -> str:
    """Markdown whose links to pages and pictures of this repository are absolute."""
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{FILES}", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{PAGES}", text)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=absolute(readme), long_description_content_type="text/markdown")
