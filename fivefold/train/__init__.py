"""Training: a plan on forked ranks of this machine, or one rank of it under a launcher."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
