"""Floor 1: pure values. Nothing here imports torch; plan and run both speak this language."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
