"""How deep a training is: who reads it from `ff.train` to the model follows so many calls."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import fivefold
from fivefold.model.decoder import Decoder
from tests.house import PACKAGE

MOST_FRAMES = 14  # of our own, `train` and `Decoder.forward` included; torch's do not count


def test_few_frames_lie_between_train_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is forked within `train`, so that its stack begins with the caller's."""
    report, forward = tmp_path / "frames", Decoder.forward

    def traced(self: Decoder, *args: Any) -> Any:
        ours = [frame for frame in traceback.extract_stack() if str(PACKAGE) in frame.filename]
        lines = [f"{frame.filename} {frame.name}" for frame in ours]
        report.write_text("\n".join([*lines, "Decoder.forward"]), "utf-8")
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", traced)
    fivefold.train("tiny", steps=1, layout="dp=1", out=tmp_path / "run")
    frames = report.read_text("utf-8").splitlines()
    assert frames[0].endswith(" train")
    assert len(frames) <= MOST_FRAMES, "\n".join(frames)
