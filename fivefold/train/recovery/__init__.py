"""What a run does about failures: copies in memory, checks, steps that run again."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
