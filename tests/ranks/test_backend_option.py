"""`--backend` of verify, train and calibrate: what is refused before any rank is started, and the
notes that tell what was chosen.

No GPU is needed: the number of GPUs and the NCCL library are given.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from fivefold.cli import main
from fivefold.commands import verify as verifying
from fivefold.commands.job import BACKENDS
from fivefold.launch import backend
from fivefold.launch.backend import Backend, NcclLibrary

NONE = NcclLibrary(None)
OLD = NcclLibrary((2, 28, 9))
OLD_TOLD = NcclLibrary((2, 28, 9), may_share=True)
NEW = NcclLibrary((2, 30, 7), may_share=True)


def test_the_option_has_the_backends_there_are() -> None:
    assert get_args(Backend) == BACKENDS


def given(monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: NcclLibrary) -> None:
    monkeypatch.setattr(backend, "num_gpus", lambda: gpus)
    monkeypatch.setattr(NcclLibrary, "current", lambda: nccl)


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    output = capsys.readouterr()
    assert stop.value.code == 2 and not output.out
    return output.err


@pytest.mark.parametrize("verb", ["verify", "train", "calibrate"])
def test_the_option_is_in_the_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--backend" in text and "nccl or gloo" in text


@pytest.mark.parametrize("verb", ["verify", "train", "calibrate"])
def test_a_typo_is_refused(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert "unknown --backend 'ncl': did you mean nccl?" in refuse(capsys, verb, "--backend", "ncl")


@pytest.mark.parametrize("verb", ["verify", "train", "calibrate"])
def test_nccl_on_cpus_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (verb, "--device", "cpu", "--backend", "nccl")
    assert "--backend nccl is for GPUs" in refuse(capsys, *words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("verb", ["verify", "train"])
@pytest.mark.parametrize(
    ("gpus", "nccl", "says"),
    [(1, OLD, "2 ranks on 1 GPU: NCCL"), (1, OLD_TOLD, "cannot share"), (2, NONE, "no NCCL")],
)
def test_nccl_that_cannot_be_had_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    verb: str,
    gpus: int,
    nccl: NcclLibrary,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given(monkeypatch, gpus, nccl)
    words = (verb, "tiny", "--layout", "tp=2", "--device", "cuda", "--backend", "nccl")
    assert says in refuse(capsys, *words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "words", [("train", "tiny", "--layout", "dp=2", "--out", "run"), ("calibrate",)]
)
def test_ranks_of_torchrun_that_cannot_share_are_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    given(monkeypatch, 1, OLD)
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "2 ranks on 1 GPU: NCCL refuses ranks that share" in refuse(capsys, *words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("layout", "words", "gpus", "nccl", "backend_of_ranks", "notes"),
    [
        (
            "tp=2",
            (),
            1,
            OLD,
            "gloo",
            [
                "all processes share one GPU",
                "collectives go through pinned host memory over gloo; 2 ranks share a GPU, which "
                "NCCL refuses without NCCL_MULTI_RANK_GPU_ENABLE=1",
            ],
        ),
        (
            "tp=2",
            (),
            1,
            NEW,
            "nccl",
            ["all processes share one GPU", "collectives go over NCCL 2.30.7; 2 ranks share a GPU"],
        ),
        ("tp=2", (), 2, OLD, "nccl", ["collectives go over NCCL 2.28.9"]),
        (
            "tp=2",
            ("--backend", "gloo"),
            2,
            OLD,
            "gloo",
            ["collectives go through pinned host memory over gloo"],
        ),
        ("dp=1", (), 1, OLD, "nccl", ["all processes share one GPU"]),
    ],
)
def test_the_notes_of_verify_tell_the_backend(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    words: tuple[str, ...],
    gpus: int,
    nccl: NcclLibrary,
    backend_of_ranks: str,
    notes: list[str],
) -> None:
    given(monkeypatch, gpus, nccl)
    seen: list[Any] = []
    passed = SimpleNamespace(passed=True)
    monkeypatch.setattr(verifying, "_verify", lambda *given: seen.append(given) or passed)
    with pytest.raises(SystemExit) as stop:
        main(["verify", "tiny", "--layout", layout, "--device", "cuda", *words])
    assert not stop.value.code
    ((plan, chosen, *_),) = seen
    assert chosen["backend"] == backend_of_ranks
    about = [note for note in plan.notes if "GPU" in note or "collectives" in note]
    assert about == notes
