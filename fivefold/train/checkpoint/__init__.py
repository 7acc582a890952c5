"""Checkpoints: any layout writes them, any other loads them, and nothing is read unverified.

`Checkpoints` saves and loads those of a run on all ranks: a save goes on in the background while
the next steps run, a load puts the tensors into whatever layout runs now. `Reader` and
`write_checkpoint` do it in one process, one full tensor at a time: export and import use them.
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
