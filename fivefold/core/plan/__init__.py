"""Plans: a model, a layout, a machine and a recipe as one value, and its strict TOML."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
