"""A hook of the documentation site: links that leave docs become the names of their files."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with `[the script](../examples/a.py)` as the script (`examples/a.py`)."""
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}`)", markdown)
