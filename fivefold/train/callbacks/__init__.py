"""What a training run does besides its steps: one file for each concern.

The loop calls every callback at the same moments, in the order of its list; only `finish` is called
in reverse, so that the last checkpoint is written before the record says that the run has ended.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
