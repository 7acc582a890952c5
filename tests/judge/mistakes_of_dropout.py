"""Mistakes in dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fivefold.data import batches, rank_reader
from fivefold.data.batches import Samples
from fivefold.model import decoder, dropout
from tests.judge.planting import Patch, instead


def nothing_dropped() -> Patch:
    return instead(Samples, "drawing", lambda real, self, seed, numbers: self)


def one_mask_for_all_steps() -> Patch:
    def same(real: Any, seed: int, numbers: Any, seq: int) -> Any:
        return real(seed, numbers % 8, seq)

    return instead(batches, "token_keys", same)


def seed_of_dropout_ignored() -> Patch:
    return instead(batches, "token_keys", lambda real, seed, *rest: real(0, *rest))


def one_mask_for_all_sites() -> Patch:
    return instead(dropout.SiteKeys, "of", lambda real, self, site: self.keys_NBS[0])


def mean_of_what_is_kept_not_restored() -> Patch:
    def smaller(real: Any, fuse: Any) -> Any:
        return lambda x, keys, rate: real(fuse)(x, keys, rate) * (1 - rate)

    return instead(decoder, "dropping", smaller)


def pairs_kept() -> Patch:
    def all_kept(real: Any, *given: Any) -> Any:
        return torch.ones_like(real(*given))

    return instead(dropout.PairDropout, "keeps", all_kept)


@contextmanager
def dropped_in_evaluation() -> Iterator[None]:
    """Two things prevent it: held-out rows have no keys, and the model is told."""

    def keyed(real: Any, self: Any, places: Any) -> Iterator[Any]:
        for microbatches in real(self, places):
            rows = torch.arange(len(microbatches[0].tokens))
            keys = dropout.token_keys(0, rows, self.batch.seq)
            yield [replace(each, keys=keys) for each in microbatches]

    untold = instead(decoder.Decoder, "eval", lambda real, self: self)
    with instead(rank_reader.RankReader, "rows", keyed), untold:
        yield
