"""The command `fivefold rehearse`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_rehearsal import sends_another_size

from fivefold.cli import main
from fivefold.parallel.mesh import Mesh

WORDS = ("rehearse", "tiny", "--layout", "pp=2", "--seq", "16", "--microbatches", "2")
SMALL = ("--set", "layers=2", "vocab=64")


def answered(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stop:
        main([*words, *SMALL])
    output = capsys.readouterr()
    assert stop.value.code == code, output.err
    return output.out, output.err


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "memory.json"
    out, _ = answered(
        capsys, 0, *WORDS, "--json", "--set", f"perfetto={trace}", "--machine", "h100"
    )
    table = json.loads(out)
    assert [each["rank"] for each in table["ranks"]] == [0, 1]
    assert table["memory_gib"]["total"] == max(
        each["memory_gib"]["total"] for each in table["ranks"]
    )
    assert table["traffic"]["predicted"] == table["traffic"]["observed"]
    assert table["traffic"]["match"] is table["matched"] is table["passed"] is True
    assert table["order"]["ok"] is True
    assert table["order"]["ranks"] == 2
    assert table["order"]["cycle"] == table["order"]["unconnected"] == []
    assert table["time"] is None
    assert table["planned_gib"]["total"] > 0
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    names = {each["name"] for each in events if each["ph"] == "C"}
    assert names == {"GiB of rank 0", "GiB of rank 1"}


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = answered(capsys, 0, *WORDS, "--layout", "dp=4", "--rank", "3")
    assert "1 rank of 4" in out
    assert "all groups agree" in out


def test_a_mismatch_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with sends_another_size():
        out, _ = answered(capsys, 1, *WORDS, "--json")
    table = json.loads(out)
    assert table["matched"] is table["traffic"]["match"] is table["passed"] is False
    (parted,) = table["mismatches"]
    assert "rank 0 makes recv of" in parted
    assert "rank 1 makes send of" in parted


def test_a_rank_that_cannot_be_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    inner = Mesh.send

    def broken(self: Mesh, *given: Any) -> Any:
        if self.rank == 0:
            raise ValueError("nothing to send")
        return inner(self, *given)

    with patch.object(Mesh, "send", broken):
        _, err = answered(capsys, 1, *WORDS)
    assert "lost rank 0: it raised ValueError: nothing to send" in err


MOE = ("rehearse", "tiny-moe", "--layout", "dp=2 ep=2")
REFUSED = [
    ((*WORDS, "--rank", "2"), "ranks 0 to 1"),
    ((*WORDS, "--rank", "-1"), "ranks 0 to 1"),
    ((*WORDS, "--schedule", "pipedream"), "asynchronous"),
    ((*WORDS, "--set", "imbalance=2"), "needs experts"),
    ((*WORDS, "--device", "tpu"), "unknown --device"),
    ((*MOE, "--set", "imbalance=4.5"), "1 to 4 times the mean"),
    ((*MOE, "--set", "balance=capacity:1.5"), "capacity-pad"),
    ((*MOE, "--set", "ep_nodes=2", "--set", "imbalance=2"), "ep_nodes=1"),
    ((*MOE, "--precision", "fp32"), "rehearse with --precision bf16"),
    ((*MOE, "--set", "moe.ffn=100"), "a multiple of 8"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_bad_input_ends_with_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    with patch("fivefold.rehearse.rehearsal.rehearse", side_effect=AssertionError):
        out, err = answered(capsys, 2, *words)
    assert not out
    assert said in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = answered(capsys, 2, *WORDS, "--device", "cuda")
    assert "no GPU" in err
