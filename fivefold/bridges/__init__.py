"""Bridges: a plan as another framework's configuration, and such a file as a plan.

One file per framework has the table of its keys, which writes and reads. Before it is written, a
plan becomes the nearest that the framework can express (`nearest.py`); what is lost is said.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
