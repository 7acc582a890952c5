"""Floor 2: one room per dimension, mechanism inside; the rooms meet only in `compose`."""
