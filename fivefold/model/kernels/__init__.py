"""Kernels of our own, and those of attention."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
