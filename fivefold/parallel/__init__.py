"""One room per dimension, its mechanism inside; the rooms meet only in `compose`."""
