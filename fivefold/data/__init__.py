"""Training data: text to token shards, and token shards to samples in an order that is the same on
every layout."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
