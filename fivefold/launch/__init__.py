"""How ranks start, meet, and are watched: forked on this machine, or started by a launcher."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
