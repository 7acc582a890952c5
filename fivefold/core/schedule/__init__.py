"""Pipeline schedules as values: one object is checked, timed, drawn and executed.

Actions have a text form: `2F0` is the forward of stage 2 for microbatch 0, `2I0` its input
gradient, `2W0` its weight gradient, `2B0` both at once. `(2F4;5B0)OVERLAP_F_B` is a forward and a
backward that run as one. This is torch's own spelling, so files travel both ways.

A placement says which rank has which stage: a stage is a contiguous range of layers, and a rank
with several stages calls each of them a chunk. A schedule is a placement and the order of actions
on every rank. The messages between ranks follow from it.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
