"""What a training on preference pairs needs before a rank starts: data and a plan that suit it, and
in a run that has begun the log-probabilities of its reference (`preference.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Batch
from fivefold.core.plan import Plan, Recipe
from fivefold.data import SIDES, Corpus, EvaluationSet, Source, Synthetic, is_paired

FILE = "reference.npz"
References = dict[str, NDArray[np.float64]]
"""By the content of a corpus: of all its texts, chosen, rejected, chosen, rejected, …"""


def require_pairs(plan: Plan, recipe: Recipe, corpora: Sequence[Corpus | Synthetic]) -> None:
    """Refuse pairs without DPO, DPO without pairs, and plans that cannot run it."""
    for corpus in corpora:
        paired = is_paired(corpus)
        if paired and not recipe.dpo_beta:
            raise FivefoldError(
                f"{corpus.name} has preference pairs: train on them with dpo_beta above 0, as in "
                "--set dpo_beta=0.1"
            )
        if recipe.dpo_beta and not paired:
            raise FivefoldError(
                f"dpo_beta = {recipe.dpo_beta}, and {corpus.name} has no preference pairs: give "
                "rows with chosen and rejected to `fivefold tokens --pairs`, or leave dpo_beta out"
            )
    if recipe.dpo_beta:
        problems = [*_impossible(plan, plan.batch), *_too_long(plan, corpora)]
        if problems:
            raise FivefoldError("cannot train on preference pairs with " + "; ".join(problems))


def _impossible(plan: Plan, batch: Batch) -> list[str]:
    problems: list[str] = []
    if batch.microbatch_size != 1:
        rule = f"microbatches of {batch.microbatch_size} sequences: a text is a microbatch"
        problems.append(f"{rule}; give --microbatch-size 1")
    if batch.sequences % SIDES:
        rule = f"a global batch of {batch.sequences} sequences: a pair has two"
        problems.append(f"{rule}; give an even --batch")
    if plan.shape.drops:
        problems.append("dropout: a reference has none; set it to 0 in the model")
    if plan.shape.mtp:
        problems.append("multi-token prediction: its losses are no part of DPO; set mtp to 0")
    return problems


def _too_long(plan: Plan, corpora: Sequence[Corpus | Synthetic]) -> list[str]:
    capacity = plan.batch.seq + 1
    return [
        f"{corpus.name}, which has a text of {corpus.longest:,} tokens where {capacity:,} fit; "
        f"give --seq {corpus.longest - 1} or more, or tokenize with --max-tokens {capacity}"
        for corpus in corpora
        if isinstance(corpus, Corpus) and corpus.longest > capacity
    ]


def pair_corpora(source: Source, sets: Sequence[EvaluationSet]) -> list[Corpus]:
    """Corpora of pairs for training and evaluation."""
    corpora = [part.corpus for part in source.parts]
    corpora += [corpus for eval_set in sets for corpus, _ in eval_set.rows[:1]]
    return [
        candidate
        for candidate in dict.fromkeys(corpora)
        if isinstance(candidate, Corpus) and candidate.paired
    ]


@cache
def identity(corpus: Corpus | Synthetic) -> str:
    """Identity of a corpus by its pairs, wherever its folder is."""
    assert isinstance(corpus, Corpus)
    digest = hashlib.sha256()
    for shard in corpus.shards:
        assert shard.mask is not None
        for array in (shard.tokens, shard.begins, shard.mask):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read_references(folder: Path, corpora: Iterable[Corpus]) -> References:
    """Reference log-probabilities of these corpora; raises if there are none."""
    path = folder / FILE
    remedy = "start a new run from its weights (`fivefold export`, then `fivefold import`)"
    if not path.is_file():
        rule = f"{folder} has steps and no {FILE}: DPO computes its reference before the first step"
        raise FivefoldError(f"{rule}; {remedy}")
    try:
        with np.load(path, allow_pickle=False) as table:
            references: References = {name: table[name] for name in table.files}
    except (OSError, ValueError, EOFError) as error:
        raise BadFile(str(path), [f"cannot be read ({error}); {remedy}"]) from error
    for corpus in corpora:
        if identity(corpus) not in references:
            raise FivefoldError(
                f"{path} has no log-probabilities of {corpus.name}: train on the pairs that the "
                f"run began with, or {remedy}"
            )
    return references
