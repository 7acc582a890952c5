"""A plan run by many ranks and compared with one process."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
