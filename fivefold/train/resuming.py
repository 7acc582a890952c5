"""What a resume finds out before any process starts: that it cannot go on, or goes on otherwise."""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.core.corpora import moved_corpora
from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, read, resolve
from fivefold.records.run_folder import CHECKPOINTS, PLAN
from fivefold.train.checkpoint import published
from fivefold.train.checkpoint.folders import Damaged, Manifest, newer_format, verified_manifest
from fivefold.train.state import TrainSettings


def check_resume(plan: Plan, settings: TrainSettings) -> list[str]:
    """Refuse what the ranks would refuse; returns what differs from the steps before."""
    if not settings.resume or settings.folder is None:
        return []
    found = _newest(settings.folder)
    if found is None:
        return []
    _, manifest = found
    return _other_rows(plan, settings, manifest) if manifest.facts.samples else []


def _newest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that looks good; the ranks verify it, and report those that do not."""
    for path in reversed(published(folder / CHECKPOINTS)):
        if (newer := newer_format(path)) is not None:
            raise FivefoldError(newer)
        try:
            return path, verified_manifest(path)
        except Damaged:
            continue
    return None


def _other_rows(plan: Plan, settings: TrainSettings, manifest: Manifest) -> list[str]:
    """Samples are counted in rows of the data: others mean other rows."""
    assert settings.folder is not None
    try:
        options = read(settings.folder / PLAN)
        before = resolve(options).batch.seq
    except (FivefoldError, OSError):  # it is of an older version, or gone
        return []
    row = f"row {manifest.facts.samples:,}"
    said: list[str] = []
    if before != plan.batch.seq:
        said.append(
            f"the run had rows of {before:,} tokens, and goes on with rows of {plan.batch.seq:,}, "
            f"at {row} of those: text may be read again, or never; --seq {before} goes on as before"
        )
    was, now = (
        moved_corpora(each, os.path.abspath)
        for each in (options.train.data, plan.options.train.data)
    )
    if was != now:
        said.append(
            f"the run has read data = {options.train.data} until now, and goes on with "
            f"{plan.options.train.data}, at {row} of it; --set data={options.train.data} goes on "
            "as before"
        )
    return said
