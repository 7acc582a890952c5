"""Any rank of any job on one machine: the real program without the others."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
