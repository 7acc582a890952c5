"""The page of `fivefold observe`: its questions, their answers, and how they are drawn."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
