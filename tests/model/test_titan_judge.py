"""Folders of weights that TorchTitan's own code loads and saves, where it is installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from small import batch_of, filled
from test_titan_weights import JUDGED, config_of, fivefold, logits_of, of_run, saved, titan_state
from torch import Tensor

from fivefold.core.model.shape import Shape

_VERSION = version("torchtitan") if find_spec("torchtitan") is not None else ""
_WHY = "no torchtitan: see the head of tests/pure/test_bridge_judges.py"


@pytest.mark.skipif(not _VERSION, reason=_WHY)
@pytest.mark.parametrize("name", JUDGED)
def test_torchtitan_loads_and_saves_it(name: str, tmp_path: Path) -> None:
    """Our folder, loaded by its CheckpointManager into its model: equal logits. What it then saves,
    after two steps, with states and without, is imported: equal logits again."""
    form, shape = JUDGED[name]
    is_old = form == "torchtitan"
    if _VERSION.startswith("0.2.") != is_old:
        pytest.skip(f"torchtitan {_VERSION} has other names")
    config, run = config_of(shape, tmp_path / "config"), tmp_path / "run"
    # Rows in any order are some model: the one that is imported is what is compared.
    state = titan_state(form, shape, filled(shape, torch.float32))
    fivefold("import", saved(tmp_path / "in", state), "--model", config, "-o", run)
    fivefold("export", run, tmp_path / "out", "--format", form)
    torch.save(batch_of(shape, seq=24).tokens, tmp_path / "tokens.pt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.titan_judge", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(tmp_path / "logits.pt")
    assert not torch.allclose(theirs["changed"], theirs["loaded"], atol=1e-2)
    same = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(theirs["loaded"].flatten(0, 1), logits_of_run(run, shape), **same)
    if is_old and shape.qk_norm == "none":  # its llama3 ties no head
        shape = replace(shape, tied=False)
        config_of(shape, config)
    for kind in ("full", "model"):
        again = tmp_path / "again" / kind
        fivefold("import", tmp_path / kind, "--model", config, "-o", again)
        mine = logits_of_run(again, shape)
        torch.testing.assert_close(theirs["changed"].flatten(0, 1), mine, **same)


def logits_of_run(run: Path, shape: Shape) -> Tensor:
    return logits_of(of_run(run, shape)).float()
