"""The page of `fivefold observe`: its questions, their answers, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

View = dict[str, Any]  # an answer or a part of one, ready for JSON
Params = Mapping[str, str]  # the parameters of a question, as texts
Progress = Callable[[float], None]  # called with the share that is done, from 0 to 1
