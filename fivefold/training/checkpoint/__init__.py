"""Checkpoints: any layout writes them, any other reads them, and nothing is read unverified."""

from fivefold.training.checkpoint.checkpoints import Checkpoints
from fivefold.training.checkpoint.crew import CannotSave
from fivefold.training.checkpoint.folders import latest, published
from fivefold.training.checkpoint.manifest import Facts
from fivefold.training.checkpoint.offline import Reader, write_whole
from fivefold.training.checkpoint.slots import Slot, slots_of, spread

__all__ = [
    "CannotSave",
    "Checkpoints",
    "Facts",
    "Reader",
    "Slot",
    "latest",
    "published",
    "slots_of",
    "spread",
    "write_whole",
]
