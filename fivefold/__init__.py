"""fivefold: transformers across five dimensions of parallelism, planned, verified and measured."""

from __future__ import annotations

__version__ = "0.1.0"
