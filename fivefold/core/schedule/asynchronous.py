"""Pipelines that never drain: gradients are computed on weights of some updates ago.

PipeDream (Narayanan et al. 2019) updates after every microbatch and stashes weights: stage s
keeps p − s versions, and its gradients come p − s − 1 updates late. PipeDream-2BW (Narayanan et
al. 2021) gathers gradients over m ≥ p microbatches and keeps two versions, one update late.
Neither computes what one device would; both are labelled asynchronous wherever they are offered.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.core.schedule.flush import one_forward_one_backward
from fivefold.core.schedule.value import Schedule


def pipedream(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """One window of the endless 1F1B order, with one weight version for each forward ahead."""
    versions = tuple(num_ranks - rank for rank in range(num_ranks))
    return _endless("pipedream", num_ranks, num_microbatches, versions)


def pipedream_2bw(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The same order with two weight versions, because updates come every m ≥ p microbatches."""
    return _endless("pipedream-2bw", num_ranks, num_microbatches, (2,) * num_ranks)


def _endless(
    name: str, num_ranks: int, num_microbatches: int, versions: tuple[int, ...]
) -> Schedule:
    window = one_forward_one_backward(num_ranks, num_microbatches)
    return replace(window, name=name, asynchronous=True, weight_versions=versions)
