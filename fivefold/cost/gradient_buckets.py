"""In how many collectives the gradients of a rank are reduced below ZeRO-3.

Every collective pays the latency of all hops of its ring, which grows with the ranks. So small
buckets cost little on one node, and are most of a small step on many.
"""

from __future__ import annotations

import numpy as np

from fivefold.cost.grid import Array

# Matrices of a layer that fill a bucket each, if they are larger: queries with keys and values,
# output, gate with up, down.
_LAYER_MATRICES = 4
_ENDS = 2  # embedding and head


def num_buckets(weights: Array, layers: Array, bucket_bytes: float | None) -> Array | float:
    """Buckets of so many bytes of weights in so many layers; a matrix is never split."""
    if bucket_bytes is None:
        return 1.0
    return np.clip(weights / bucket_bytes, 1.0, _LAYER_MATRICES * layers + _ENDS)
