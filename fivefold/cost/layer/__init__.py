"""One layer on one rank: operators, and the seconds of its kernels."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
