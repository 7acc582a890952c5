"""Layouts: which rank has what of a job, and which layouts are legal."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
