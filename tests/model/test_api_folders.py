"""`ff.import_model` and `ff.export`: they return what their commands print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert not stop.value.code
    return capsys.readouterr().out


def test_a_run_goes_to_hugging_face_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ff.train("tiny", layout="dp=1", steps=1, seq=16, layers=1, out="run")
    model = tmp_path / "model"
    exported = ff.export(run, model, dtype="fp32")
    imported = ff.import_model(model, out="imported")
    assert exported.parameters == imported.parameters and imported.folder == Path("imported")
    assert not capsys.readouterr().out
    for path in model.iterdir():
        path.unlink()
    words = ("export", "run", str(model), "--dtype", "fp32")
    assert printed(capsys, *words) == f"{exported}\n"
    table = json.loads(printed(capsys, "import", str(model), "-o", "again", "--json"))
    ours = json.loads(json.dumps(imported.to_json()))
    differing = {key for key in ours if ours[key] != table[key]}
    assert differing <= {"run", "checkpoint", "next"}
