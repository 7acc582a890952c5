"""What a resume finds out before any process starts: that it cannot go on, or goes on otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fivefold.core import FivefoldError
from fivefold.core.layout import buffers, weights
from fivefold.core.plan import OPTIMIZERS, Plan, moved_corpora, resolve
from fivefold.optim import StateInMemory
from fivefold.records import CHECKPOINTS, options_of
from fivefold.train import TrainSettings
from fivefold.train.checkpoint import (
    METADATA,
    MODEL,
    OPTIM,
    CheckpointTensor,
    Damaged,
    Manifest,
    StoredTensors,
    damage_of,
    newer_format,
    problems_of,
    published,
    require_same_tensors,
    require_seed,
    verified_manifest,
)


def check_resume(plan: Plan, settings: TrainSettings) -> list[str]:
    """Refuse a resume that ranks would refuse; returns differences to earlier steps."""
    if not settings.options.resume or settings.folder is None:
        return []
    checkpoint = _newest(settings.folder)
    if checkpoint is None:
        return []
    path, manifest, stored = checkpoint
    require_seed(manifest.facts, settings.recipe.seed)
    require_same_tensors(path, stored, _expected(plan, settings, stored))
    return _other_rows(plan, settings, manifest) if manifest.facts.samples else []


def nothing_left(settings: TrainSettings) -> str | None:
    """Message about a run whose newest checkpoint is at the last step of this start; None if steps
    are left, or if that checkpoint is damaged."""
    checkpoint = None if settings.folder is None else _newest(settings.folder)
    if checkpoint is None or checkpoint[1].facts.step < settings.last_step:
        return None
    path, manifest, _ = checkpoint
    if damage_of(path, manifest):
        return None
    step, last = manifest.facts.step, settings.last_step
    option = "--steps" if last == settings.recipe.steps else "--until"
    return (
        f"nothing is left to train: {settings.folder} is at step {step}, and this start ends after "
        f"step {last}; go on with {option} N, and N above {step}"
    )


def _newest(folder: Path) -> tuple[Path, Manifest, StoredTensors] | None:
    """The newest checkpoint that looks good; the ranks verify it, and report those that do not."""
    paths = published(folder / CHECKPOINTS)
    for path in reversed(paths):
        if (newer := newer_format(path)) is not None:
            raise FivefoldError(newer)
    for path in reversed(paths):
        try:
            manifest = verified_manifest(path)
            table = manifest.files if manifest.parts else [METADATA]
            if not problems_of(path, manifest, table):
                return path, manifest, StoredTensors.of(path, manifest)
        except Damaged:
            continue
    return None


def _expected(plan: Plan, settings: TrainSettings, stored: StoredTensors) -> list[CheckpointTensor]:
    """The tensors that the ranks will look for, as far as they are known without a model."""
    learning = [weight for weight in weights(plan.shape) if not weight.frozen]
    shapes = {
        MODEL + weight.name: weight.shape for weight in (*weights(plan.shape), *buffers(plan.shape))
    }
    kind = settings.recipe.optimizer_kind
    for state in kind.states:
        shapes |= {f"{OPTIM}{state}/{weight.name}": weight.shape for weight in learning}
    if kind.full_matrices:  # it has momenta of some weights, and states of AdamW of the others
        missing = {"momentum", *OPTIMIZERS["adamw"].states} - stored.state_names
        shapes |= {f"{OPTIM}{state}/*": () for state in missing}
    nothing = StateInMemory(torch.empty(0))
    return [
        CheckpointTensor(key, shape, torch.float32, (), nothing) for key, shape in shapes.items()
    ]


def _other_rows(plan: Plan, settings: TrainSettings, manifest: Manifest) -> list[str]:
    """Samples are counted in rows of the data: others mean other rows."""
    assert settings.folder is not None
    try:
        options = options_of(settings.folder)
        before = resolve(options).batch.seq
    except (FivefoldError, OSError):  # it is of an older version, or gone
        return []
    row = f"row {manifest.facts.samples:,}"
    messages: list[str] = []
    if before != plan.batch.seq:
        messages.append(
            f"the run had rows of {before:,} tokens, and goes on with rows of {plan.batch.seq:,}, "
            f"at {row} of those: text may be read again, or never; --seq {before} goes on as before"
        )
    was, new_corpora = (
        moved_corpora(corpora, os.path.abspath)
        for corpora in (options.train.data, plan.options.train.data)
    )
    if was != new_corpora:
        messages.append(
            f"the run has read data = {options.train.data} until now, and goes on with "
            f"{plan.options.train.data}, at {row} of it; --set data={options.train.data} goes on "
            "as before"
        )
    return messages
