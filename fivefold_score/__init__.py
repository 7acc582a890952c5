"""How accurate estimates are: published and measured runs beside plans of them."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
