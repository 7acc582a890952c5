"""Direct preference optimization (DPO): what a step of preference pairs needs besides its rows.

The loss of a pair is −log σ(m), with m = β·((lc − rc) − (lr − rr)): lc and lr are the policy's
summed log-probabilities of the chosen and the rejected answer, rc and rr those of a frozen
reference. Its derivative by lc is −β·σ(−m), and by lr the opposite. So a step is the usual one with
a weight for the loss of each text. A text is a microbatch, and a forward before the step finds the
log-probabilities that the weights follow from, in the same layout.

The reference is the model before its first step. Its log-probabilities of all pairs are computed
then, in the same layout, and kept in the run folder: no second model is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.data import SIDES, Corpus, RowPlace
from fivefold.model import TokenBatch
from fivefold.records import naming_file
from fivefold.step import logprobs
from fivefold.train.build import BuiltRank, sets_of
from fivefold.train.callbacks import Callback
from fivefold.train.pair_rules import FILE, References, identity, pair_corpora, read_references
from fivefold.train.state import TrainSettings


class PairLoss(NamedTuple):
    """Means over pairs: loss, accuracy, margin in nats times beta, and the rewards of chosen and
    rejected answers."""

    loss: float
    accuracy: float
    margin: float
    chosen: float
    rejected: float

    def to_json(self) -> dict[str, float | None]:
        """Convert to JSON; numbers that are not finite become null."""
        return {key: value if np.isfinite(value) else None for key, value in self._asdict().items()}


class ScoredPairs(NamedTuple):
    """Loss of pairs, and its derivative by the summed cross-entropy of each text."""

    loss: PairLoss
    weights: Tensor  # (texts,)


def score_pairs(policy: Tensor, reference: Tensor, beta: float) -> ScoredPairs:
    """Score pairs from log-probabilities of texts: chosen, rejected, chosen, rejected, …"""
    rewards_P2 = beta * (policy - reference).view(-1, SIDES)
    margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
    pulls_P = beta * torch.sigmoid(-margins_P) / len(margins_P)
    loss = PairLoss(
        float(F.softplus(-margins_P).mean()),
        float((margins_P > 0).double().mean()),
        float(margins_P.mean()),
        *rewards_P2.mean(0).tolist(),
    )
    return ScoredPairs(loss, torch.stack([pulls_P, -pulls_P], 1).flatten())


@dataclass
class PreferenceObjective(Callback):
    """DPO objective: weights of a step's microbatches, and fields of its record."""

    rank: BuiltRank
    beta: float
    references: References
    last: PairLoss | None = None

    def weights(self, batches: Sequence[TokenBatch], first: int) -> list[float]:
        """Weights of this rank's microbatches in the step that begins with this sample."""
        source, batch = self.rank.reader.source, self.rank.job.plan.batch
        places = [source.row_place(first + row) for row in range(batch.sequences)]
        policy = text_logprobs(self.rank, batches)
        scored = score_pairs(policy, self._reference(places), self.beta)
        self.last = scored.loss
        own_rows = batch.rows_of(self.rank.reader.dp_coord)
        return scored.weights[own_rows].tolist()

    @property
    def loss(self) -> float:
        """Loss of the pairs of the last `weights`."""
        assert self.last is not None
        return self.last.loss

    def measure(self, number: int) -> dict[str, Any]:
        return {} if self.last is None else {"preference": self.last.to_json()}

    def evaluate(self, rows: Sequence[RowPlace]) -> PairLoss:
        """Loss of held-out pairs."""
        policy = _of_rows(self.rank, rows)
        return score_pairs(policy, self._reference(rows), self.beta).loss

    def _reference(self, places: Iterable[RowPlace]) -> Tensor:
        logprobs = [self.references[identity(corpus)][row] for corpus, row in places]
        return torch.tensor(logprobs, dtype=torch.float64)


def objective_of(rank: BuiltRank, settings: TrainSettings, begun: bool) -> PreferenceObjective:
    """Objective of a rank that is built and loaded, with references for all of its pairs."""
    source, recipe = rank.reader.source, settings.recipe
    corpora = pair_corpora(source, sets_of(rank.job.plan, recipe, source))
    references = references_of(rank, corpora, settings.folder, begun)
    return PreferenceObjective(rank, recipe.dpo_beta, references)


def text_logprobs(rank: BuiltRank, batches: Sequence[TokenBatch]) -> Tensor:
    """Summed log-probabilities of all texts of a step, in order, on every rank."""
    batch, table = rank.job.plan.batch, logprobs(rank.job, batches).cpu()
    results = torch.empty(batch.sequences, dtype=torch.float64)
    for coord, row in enumerate(table):
        results[batch.rows_of(coord)] = row
    return results


def _of_rows(rank: BuiltRank, rows: Sequence[RowPlace]) -> Tensor:
    logprobs = [text_logprobs(rank, batches) for batches in rank.reader.rows(rows)]
    return torch.cat(logprobs)[: len(rows)]


def references_of(
    rank: BuiltRank, corpora: Sequence[Corpus], folder: Path | None, begun: bool
) -> References:
    """Log-probabilities of all pairs under the initial model: computed before the first step, and
    read from the run folder by a run that has `begun`."""
    if begun and folder is not None:
        return read_references(folder, corpora)
    seq, references = rank.job.plan.batch.seq, References()
    for corpus in corpora:
        rows = [(corpus, row) for row in range(corpus.num_rows(seq))]
        references[identity(corpus)] = _of_rows(rank, rows).numpy()
    if folder is not None and rank.job.mesh.rank == 0:
        # Write references atomically.
        beside = folder / f".{os.getpid()}.{FILE}"
        with naming_file(folder / FILE):
            try:
                with beside.open("wb") as file:
                    np.savez(file, allow_pickle=False, **references)  # type: ignore[arg-type]
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(folder / FILE)
            finally:
                beside.unlink(missing_ok=True)
    return references
