"""The page of `fivefold observe`: what can be asked, what is answered, and how it is shown."""

from __future__ import annotations

from typing import Any

View = dict[str, Any]
