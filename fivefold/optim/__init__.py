"""Optimizers over the shards that a rank owns. `make_updater` makes the one that a recipe asks for.

The registry is `OPTIMIZERS` in `core/plan/recipe.py`: names, facts that planning needs, and for
each optimizer the function of this package that makes it.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
