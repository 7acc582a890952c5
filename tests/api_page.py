"""The page on Python, by its headings."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "python.md"
OWN = "ff.Callback, and other code of yours"
LONG = ("ff.rehearse", "ff.verify", "ff.train", "ff.generate", OWN)  # they start ranks


@cache
def sections() -> list[tuple[str, str]]:
    """The title and the text of every section."""
    parts = re.split(r"^## (.+)\n", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
