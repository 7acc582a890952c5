"""A decoder transformer in plain PyTorch. It runs on one device and knows no rank."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
