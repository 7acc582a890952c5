"""What a job costs, in bytes and seconds: the same arithmetic for one layout and for a million."""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
