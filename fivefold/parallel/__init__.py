"""One room per dimension, its mechanism inside; the rooms meet only in `composition`."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
