"""Models as numbers: shapes, counts, presets, and configs of Hugging Face."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
