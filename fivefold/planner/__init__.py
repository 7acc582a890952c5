"""The best plans for a job whose layout is open: request, search, simulate, rank, choose.

A search ranks millions of layouts by bounds. The best of them become plan options again, are
resolved, and are simulated one by one; that decides the order in which they are shown. Layouts that
differ from the fastest by less than estimates can tell are equal, and the simplest of them is the
first choice.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
