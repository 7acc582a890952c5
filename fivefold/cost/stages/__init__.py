"""Seconds of a pipeline and of its stages."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
