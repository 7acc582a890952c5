"""Seconds of a step, of an update, of a save and of a served token."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
