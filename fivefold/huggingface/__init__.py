"""Hugging Face model folders, read and written."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
