"""One rank of a training run: its shards of the model, its optimizer and its data."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fivefold.core import FivefoldError
from fivefold.core.plan import Plan, Recipe
from fivefold.core.schedule import Step
from fivefold.data import (
    Corpus,
    EvaluationSet,
    RankReader,
    Source,
    Synthetic,
    evaluation_sets,
    is_paired,
    open_source,
    require_set,
)
from fivefold.launch import Worker
from fivefold.model.kernels import compiled, eager
from fivefold.optim import Updater
from fivefold.parallel import ActionObserver, Instruments, Job, Mesh, compose
from fivefold.parallel.units import GradientHome
from fivefold.records import RunFolder, TimeSpent
from fivefold.step import updater_of
from fivefold.train.callbacks import PaceCallback, SpanCallback, WatchdogCallback, require_trackers
from fivefold.train.checkpoint import latest
from fivefold.train.pair_rules import pair_corpora, read_references, require_pairs
from fivefold.train.state import Progress, TrainSettings
from fivefold.train.tokenizers import require_same_tokenizer

_MOST_BATCHES = 8  # global batches of rows that a training holds out itself


@dataclass(frozen=True)
class BuiltRank:
    """Components of training on one rank."""

    job: Job
    updater: Updater
    reader: RankReader

    def close(self) -> None:
        """Wait for collectives in flight, and release the groups."""
        for chunk in self.job.chunks:
            chunk.data.wait()
        self.job.mesh.close_groups()


@dataclass(frozen=True)
class RankRun:
    """One rank of a start, and how far its run is. Without a `folder` nothing is recorded."""

    worker: Worker
    settings: TrainSettings
    folder: RunFolder | None
    rank: BuiltRank
    progress: Progress
    spent: TimeSpent
    phases: WatchdogCallback


def build_rank(
    plan: Plan,
    settings: TrainSettings,
    device: torch.device,
    phases: WatchdogCallback,
    spans: SpanCallback,
    pace: PaceCallback,
) -> BuiltRank:
    """Build one rank; `phases`, `spans` and `pace` observe its collectives, and the first two its
    actions."""
    recipe = settings.recipe
    # Kernels that add in one order, or the fastest; cuBLAS is told before it starts.
    if settings.exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.exact)
    # Keep compiled kernels with the run: ranks of a host share them, and a resumed run finds them.
    if settings.folder is not None:
        for compiler in ("TORCHINDUCTOR", "TRITON"):
            host = settings.folder.absolute() / "kernels" / socket.gethostname()
            path = host / compiler.lower()
            os.environ.setdefault(f"{compiler}_CACHE_DIR", str(path))
    mesh = Mesh.of(plan, device, observers=(phases, spans, pace))
    pace.watch(mesh)
    disk = None if recipe.disk is None else Path(recipe.disk)
    away = None if recipe.grads_disk is None else Path(recipe.grads_disk)
    for folder in (disk, away):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    job = compose(
        plan,
        mesh,
        seed=recipe.seed,
        dtype=settings.weights,
        offload=recipe.offload == "cpu",
        disk=disk,
        grad_home=None if recipe.offload_grads == "none" else GradientHome(away),
        fuse=compiled if recipe.compiles(device.type) else eager,
        instruments=Instruments(_Both(phases.actions, spans.actions), phases.evaluation),
    )
    if settings.options.check:
        job.balancing.watch()
    updater = updater_of(job, recipe, master=settings.master)
    return BuiltRank(job, updater, reader_of(plan, settings, mesh.rank, device))


class _Both(ActionObserver):
    """Chains two observers of actions."""

    def __init__(self, first: ActionObserver, second: ActionObserver) -> None:
        self.first, self.second = first, second

    def begin(self, action: Step) -> tuple[Any, Any]:
        return self.first.begin(action), self.second.begin(action)

    def end(self, token: tuple[Any, Any]) -> None:
        self.first.end(token[0])
        self.second.end(token[1])


def reader_of(plan: Plan, settings: TrainSettings, rank: int, device: torch.device) -> RankReader:
    """Reader of a rank's rows."""
    source, dp_coord = source_of(plan, settings), plan.layout.coord(rank).dp
    seed = settings.recipe.seed if plan.shape.drops else None
    return RankReader(source, plan.batch, plan.packed, dp_coord, device, seed)


def source_of(plan: Plan, settings: TrainSettings, verify: bool = False) -> Source:
    """Data source of the plan's model."""
    recipe, seq = settings.recipe, plan.batch.seq
    vocab, seed = plan.shape.vocab, recipe.seed
    source = open_source(recipe.data, vocab, seq, seed, verify=verify, loss=recipe.loss)
    corpora = [part.corpus for part in source.parts]
    require_pairs(plan, recipe, corpora)
    _require_packed(plan, corpora)
    return source


def _require_packed(plan: Plan, corpora: Iterable[Corpus | Synthetic]) -> None:
    """Rows have several conversations, which must not see one another."""
    for corpus in corpora:
        if isinstance(corpus, Corpus) and corpus.masked and not corpus.paired | plan.packed:
            raise FivefoldError(
                f"{corpus.name} has conversations, several in a row, which would see one another: "
                "give --set packed=true"
            )


def sets_of(
    plan: Plan, recipe: Recipe, source: Source, verify: bool = False
) -> list[EvaluationSet]:
    """Evaluation sets; none without evaluations."""
    if not recipe.eval_every:
        return []
    most = _MOST_BATCHES * plan.batch.sequences
    eval_sets = evaluation_sets(recipe.eval_data, source, plan.shape.vocab, most, verify=verify)
    require_set(recipe.keep_best, eval_sets)
    corpora = [corpus for eval_set in eval_sets for corpus, _ in eval_set.rows[:1]]
    require_pairs(plan, recipe, [candidate for candidate in corpora if is_paired(candidate)])
    _require_packed(plan, corpora)
    return eval_sets


def checked_source(plan: Plan, settings: TrainSettings) -> Source:
    """Data source, with its files, tokenizer and evaluation sets validated, and trackers
    installed."""
    require_trackers(settings.recipe.log)
    resumed = settings.folder if settings.options.resume else None
    require_same_tokenizer(plan, settings.recipe.data, resumed)
    source = source_of(plan, settings, verify=True)
    sets = sets_of(plan, settings.recipe, source, verify=True)
    begun = settings.options.resume and settings.folder is not None and latest(settings.folder)
    if settings.recipe.dpo_beta and begun and int(begun.name.rpartition("-")[2]):
        read_references(begun.parents[1], pair_corpora(source, sets))
    return source
