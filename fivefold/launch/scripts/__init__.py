"""Scripts that start a plan on a cluster."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
