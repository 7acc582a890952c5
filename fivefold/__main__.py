"""`python -m fivefold`."""

from __future__ import annotations

from fivefold.cli import main

main()
