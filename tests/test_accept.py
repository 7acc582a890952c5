"""What accepts the product on a GPU: it names the tree as git does, and sees what is wrong."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import accept, broken, journeys, on_shared_gpu
from tests.gpu.journey import Failure, Journey, SharedGpu, Trip, check_numbers, check_record

GOOD = {"step": 2, "loss": 5.0, "norm": 1.0, "mfu": 0.4, "memory_gib": 1.5}
GOOD |= dict.fromkeys(("seconds", "wall_s", "wall", "tokens_per_s", "tokens_per_s_per_gpu"), 0.5)


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "fivefold"
    # Git sorts a folder as if its name ended with a slash: after `a.py`, before `a0`.
    for name in ("a/b.py", "a.py", "a0", "empty.py", "deep/er/x.toml", "__pycache__/a.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("" if name == "empty.py" else f"{name} ü\n", "utf-8")
    (package / "a0").chmod(0o755)
    (tmp_path / ".gitignore").write_text("__pycache__/\ncarry/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_the_tree_is_what_git_says(checkout: Path) -> None:
    wanted = git(checkout, "rev-parse", "HEAD:fivefold")
    assert accept.tree_of_files(checkout / "fivefold") == wanted
    assert accept.tree_of_commit(checkout) == wanted


@pytest.mark.parametrize("copied", [False, True], ids=["with .git", "a copy"])
def test_what_is_no_commit_is_refused(checkout: Path, copied: bool) -> None:
    tree = accept.tree_of_commit(checkout)
    if copied:
        (checkout / ".git").rename(checkout / "elsewhere")
        with pytest.raises(accept.Refused, match="commits have none"):
            accept.tree_of_commit(checkout)
        (checkout / "carry").mkdir()
        (checkout / "carry" / "tree").write_text(f"{tree}\n")
        assert accept.tree_of_commit(checkout) == tree
    (checkout / "fivefold" / "new.py").write_text("")
    with pytest.raises(accept.Refused, match="is not that of a commit"):
        accept.tree_of_commit(checkout)


@pytest.mark.parametrize(
    "change",
    [{"seconds": -0.4}, {"wall_s": None}, {"wall": float("inf")}, {"loss": None}, {"mfu": -0.2}],
    ids=str,
)
def test_a_record_without_its_times_fails(change: dict[str, float | None]) -> None:
    check_record("run", GOOD)
    with pytest.raises(Failure, match="step 2 of run"):
        check_record("run", GOOD | change)


def test_numbers_that_cannot_be_fail() -> None:
    check_numbers("train", "step 2/6 | loss 5.1 | lr 1.0e-03 | 165 ms | 1.6k tok/s\nqwen3-0.6b: 3%")
    for line in ("step 2/6 | loss 5.1 | -274 ms", "loss nan", "step 1: -inf"):
        with pytest.raises(Failure):
            check_numbers("train", line)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('step 1/2 | -3 ms')", "negative"),
        ("import sys; sys.exit(2)", "ended with 2 instead of 0"),
        ("import warnings; warnings.warn('odd')", "what no user caused"),
    ],
)
def test_a_command_that_ends_wrongly_fails(tmp_path: Path, code: str, message: str) -> None:
    trip = Trip(tmp_path, {}, "cpu", SharedGpu(1), time.monotonic() + 60)
    process = trip.start([sys.executable, "-c", code], "train")
    with pytest.raises(Failure, match=message):
        trip.finish(process, "train")


def test_a_failed_journey_ends_with_1_and_stands_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[str] = []

    def broken(trip: Trip) -> None:
        trip.notes["losses"] = 3
        raise Failure("step 2 has no time")

    def victim(trip: Trip) -> None:
        tries.append("victim")
        if tries.count("victim") == 1:
            raise Failure("another client of MPS has failed")

    def timed(trip: Trip) -> None:
        tries.append("timed")
        if tries.count("timed") < 3:
            raise Failure("the host was busy")

    chosen = [Journey("calm", lambda trip: None), Journey("broken", broken, together=True)]
    chosen.append(Journey("victim", victim, together=True))
    chosen.append(Journey("timed", timed, alone=True))
    monkeypatch.setattr(journeys, "JOURNEYS", {each.name: each for each in chosen})
    facts = {"torch": "2.11", "nccl": "2.30.7", "gpu": "a GPU"}
    monkeypatch.setattr(accept, "machine_of", lambda *_: accept.Machine("cpu", {}, facts))
    monkeypatch.setattr(accept, "tree_of_commit", lambda _: "abc")
    monkeypatch.setattr(accept, "RECORD", tmp_path / "accepted.json")
    monkeypatch.setattr(accept, "PAGE", tmp_path / "accepted.md")
    assert accept.main([]) == 1
    record = json.loads((tmp_path / "accepted.json").read_text())
    assert (record["tree"], record["nccl"], record["gpu"]) == ("abc", "2.30.7", "a GPU")
    passed = {each["name"]: each["passed"] for each in record["journeys"]}
    assert passed == {"calm": True, "broken": False, "victim": True, "timed": False}
    assert [each.get("attempts") for each in record["journeys"]] == [None, 2, 2, 2]
    assert "| broken | FAIL |" in (tmp_path / "accepted.md").read_text()
    assert sorted(tries) == ["timed", "timed", "victim", "victim"]
    assert accept.main(["--again"]) == 1
    again = json.loads((tmp_path / "accepted.json").read_text())
    assert [each["passed"] for each in again["journeys"]] == [True, False, True, True]
    assert again["journeys"][:1] == record["journeys"][:1] and again["tree"] == "abc"
    timed_line = again["journeys"][3]
    assert (timed_line["attempts"], timed_line["first"]) == (3, "the host was busy")
    page = (tmp_path / "accepted.md").read_text()
    assert again["runs"] == 2 and "Joined from 2 runs" in page
    assert "at first: the host was busy" in page
    monkeypatch.setattr(accept, "tree_of_commit", lambda _: "abd")
    assert accept.main(["--again"]) == 2 and accept.main(["calm", "--again"]) == 2
    assert accept.main(["calm"]) == 0 and accept.main(["calmer"]) == 2
    assert "no journey calmer: there are calm, broken, victim, timed" in capsys.readouterr().err


@pytest.mark.parametrize("mend", broken.MENDS, ids=lambda mend: mend.journey)
def test_a_mend_can_be_taken_back(mend: broken.Mend, tmp_path: Path) -> None:
    copy = broken.copy_of(mend, tmp_path)
    text = (copy / mend.path).read_text("utf-8")
    assert mend.before in text and mend.line not in text
    ast.parse(text)
    assert (broken.ROOT / mend.cpu_test).is_file() and mend.journey in journeys.JOURNEYS


def test_a_command_runs_where_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the command's exit code; all channels are NCCL's own number of them."""
    environment = {**os.environ, "NCCL_MAX_CTAS": "1"}

    def machine_of(device: str, folder: Path) -> accept.Machine:
        return accept.Machine("cpu", environment, {})

    monkeypatch.setattr(on_shared_gpu, "machine_of", machine_of)
    code = "import os, sys; sys.exit(3 + ('NCCL_MAX_CTAS' in os.environ))"
    for options, expected in (([], 4), (["--all-channels"], 3)):
        command = ["on_shared_gpu", *options, sys.executable, "-c", code]
        monkeypatch.setattr(sys, "argv", command)
        assert on_shared_gpu.main() == expected
