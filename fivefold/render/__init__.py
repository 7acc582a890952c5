"""Values to text, tables, pictures and pages."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
