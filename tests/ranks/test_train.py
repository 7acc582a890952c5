"""`train`: the loss of one process whatever the layout, and what was planned beside what was."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pool import KeptPool
from real_widths import with_a_wrong_gradient
from test_lost_rank import SOON, children
from test_pool import wait_until_gone
from trained import train

from fivefold.cli import main
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.core.precision import Dtype
from fivefold.launch.processes import Pool
from fivefold.model.batch import TokenBatch
from fivefold.model.moe import Router
from fivefold.records.run_writer import read_records
from fivefold.records.steps import StepRecord
from fivefold.train.build import reader_of
from fivefold.train.callbacks.callback import Callback, CallbackRank
from fivefold.train.check import (
    LEAST,
    Check,
    RankArguments,
    check_runs,
    compare_with_plan,
    judge,
    reference_runs,
    single_process,
)
from fivefold.train.checkpoint.folders import latest
from fivefold.train.loop import run_rank
from fivefold.train.options import RunOptions
from fivefold.train.state import AxisTraffic, TrainedRank, TrainSettings
from tests.selection import within


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run folders do not belong into the checkout."""
    monkeypatch.chdir(tmp_path)


BATCH = 4  # sequences of a step, whatever the layout


def plan_of(layout: str, model: str = "tiny-moe", **options: Any) -> Plan:
    changes = {"layers": "3"} | options.pop("set", {})
    said = {"seq": 24, "batch": BATCH, "packed": True, **options}
    return resolve(PlanOptions(model, layout=layout, set=changes, **said))


def trained(
    pool: Pool, plan: Plan, settings: TrainSettings
) -> tuple[list[StepRecord], list[TrainedRank]]:
    lines: list[StepRecord] = []
    return lines, train(pool, plan, settings, lines.append)[0]


def checked(
    pool: Pool, plan: Plan, settings: TrainSettings
) -> tuple[list[StepRecord], list[TrainedRank], Check]:
    lines: list[StepRecord] = []
    runs, check = train(pool, plan, settings, lines.append)
    assert check is not None and len(lines) == settings.recipe.steps
    return lines, runs, check


@pytest.fixture(scope="module")
def losses(kept_pool: KeptPool) -> dict[str, list[float]]:
    """By balance, of one process."""
    settings, found = TrainSettings(Recipe(steps=3), "float64"), {}
    for balance in ("none", "aux+z"):
        plan = plan_of("dp=1", balance=balance, microbatches=BATCH)
        found[balance] = trained(kept_pool.whole(), plan, settings)[1][0].losses
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "dp=2"},
        {"layout": "dp=2 tp=2 ep=4", "balance": "aux+z"},
        {"layout": "tp=2 pp=2", "schedule": "zb-h1"},
        {"layout": "cp=2 ep=2", "zero": 1, "balance": "aux+z"},
        {"layout": "pp=2 cp=2", "recompute": "full", "set": {"tied": "true"}},
        {"layout": "dp=2 cp=2 ep=2", "seq": 23, "recompute": "selective"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_loss_of_one_process(
    pool: Pool, options: dict[str, Any], losses: dict[str, list[float]]
) -> None:
    plan = plan_of(**options)
    settings = TrainSettings(Recipe(steps=3), "float64", options=RunOptions(check=True))
    lines, runs, check = checked(pool, plan, settings)
    assert check.passed and check.difference < 1e-9 and check.spread is None
    assert check.flips == 0 and check.routed == 3 * plan.batch.tokens * 2  # 2 of 3 layers
    if plan.batch.seq == 24 and not plan.shape.tied:
        truth = losses[options.get("balance", "none")]
        assert [line.loss for line in lines] == pytest.approx(truth, abs=1e-9)
    measured = compare_with_plan(plan, settings, runs)
    assert measured is not None and measured.memory is not None
    assert measured.memory.num_as_planned == plan.layout.world, measured
    assert measured.traffic_as_planned and measured.step == 3, measured
    assert measured.memory.measured == measured.memory.planned


def test_a_dense_model_on_one_rank(pool: Pool) -> None:
    settings = TrainSettings(Recipe(steps=2), "float64", options=RunOptions(check=True))
    plan = plan_of("dp=1", model="tiny", packed=False, set={"vocab": "300"})
    lines, runs, check = checked(pool, plan, settings)
    assert check.difference == 0 and (check.flips, check.routed) == (0, 0)
    assert [line.fullest for line in lines] == [None] * 2
    measured = compare_with_plan(plan, settings, runs)
    assert measured is not None and measured.memory is not None
    assert measured.memory.num_as_planned == 1
    assert measured.traffic == measured.planned_traffic == {}


def test_float32_is_held_against_its_own_spread(pool: Pool) -> None:
    settings = TrainSettings(Recipe(steps=3), "float32", options=RunOptions(check=True))
    plan = plan_of("dp=2 tp=2 ep=2")
    _, _, check = checked(pool, plan, settings)
    assert check.passed and check.spread is not None
    assert check.allowed == max(3 * check.spread, LEAST)
    assert check.spread > 0  # the second run does sum in another order


def test_a_check_sees_what_is_wrong(pool: Pool) -> None:
    """A loss that is off, a loss that is none, and one token that went elsewhere."""
    settings = TrainSettings(Recipe(steps=2), "float64", options=RunOptions(check=True))
    plan = plan_of("dp=2")
    _, runs, _ = checked(pool, plan, settings)
    (truth,) = trained(pool, single_process(plan), settings)[1]
    assert judge(plan, runs, [truth]).passed
    for wrong in (truth.losses[0] + 2e-9, math.nan):
        astray = replace(runs[1], losses=[wrong, runs[1].losses[1]])
        assert not judge(plan, [runs[0], astray], [truth]).passed
    spread = replace(truth, losses=[each + 1e-6 for each in truth.losses])
    assert judge(plan, runs, [truth, spread]).allowed == pytest.approx(3e-6)
    runs[1].routes[1][2, 0][0, 5, 0] += 1
    assert judge(plan, runs, [truth]).flips == 1


def alone(pool: Pool, plan: Plan, settings: TrainSettings) -> list[TrainedRank]:
    """The runs of one process that a check takes."""
    return pool.run_each([(run_rank, each) for each in reference_runs(plan, settings)])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("tensor", ["blocks.1.mlp.experts.down.weight", "norm.weight"])
def test_a_wrong_gradient_is_named_where_losses_hardly_differ(
    pool: Pool, tensor: str, dtype: Dtype
) -> None:
    settings = TrainSettings(Recipe(steps=2), dtype, options=RunOptions(check=True))
    plan = plan_of("dp=2 tp=2 ep=2")
    references = alone(pool, plan, settings)
    runs = pool.run_each([(run_rank, (plan, settings))] * plan.layout.world)
    check = judge(plan, runs, references)
    assert check.passed and check.gradients is not None and check.gradients.steps == 2
    wrong = pool.run_each([(with_a_wrong_gradient, (plan, settings, tensor))] * plan.layout.world)
    check = judge(plan, wrong, references)
    assert not check.passed and check.gradients is not None
    assert (check.gradients.tensor, check.gradients.step) == (tensor, 1)
    assert check.gradients.difference == pytest.approx(1e-3, rel=0.01)
    if dtype == "float32":
        assert check.difference <= check.allowed  # AdamW divides the scale of a gradient away


def test_the_runs_of_one_process_record_nothing_and_reorder_without_a_compiler() -> None:
    recipe, plan = Recipe(steps=2, compile=True, sample_every=1), plan_of("dp=2")
    settings = TrainSettings(recipe, "float32", options=RunOptions(check=True), folder=Path("run"))
    plain, reordered = reference_runs(plan, settings)
    for alone_plan, alike, *_ in (plain, reordered):
        assert alone_plan.layout.world == 1
        assert alike.folder is None and not alike.recipe.sample_every
    assert [each[2] for each in (plain, reordered)] == [False, True]
    assert plain[1].recipe.compile and not reordered[1].recipe.compile
    assert len(reference_runs(plan, replace(settings, dtype="float64"))) == 1


class EqualRouters(Callback):
    """Gives all experts the same score: any of them is a tie."""

    def setup(self, rank: CallbackRank) -> None:
        with torch.no_grad():
            for module in rank.modules:
                for router in module.modules():
                    if isinstance(router, Router):
                        router.weight.zero_()


@pytest.mark.parametrize("tied", [True, False], ids=["a tie", "another choice"])
def test_tokens_that_rounding_sends_elsewhere_are_followed(pool: Pool, tied: bool) -> None:
    """The loss jumps by more than rounding; with the experts of the ranks it does not. Experts
    with another score are still wrong."""
    callbacks = (EqualRouters(),) if tied else ()
    options = RunOptions(check=True, callbacks=callbacks)
    plan, settings = plan_of("dp=1"), TrainSettings(Recipe(steps=1), "float32", options=options)

    def run(arguments: RankArguments) -> TrainedRank:
        single, alone, *rest = arguments
        alone = replace(alone, options=replace(alone.options, callbacks=callbacks))
        return pool.run_each([(run_rank, (single, alone, *rest))])[0]

    truth, other = (run((plan, settings, reordered, None, ())) for reordered in (False, True))
    routes = [{place: experts.copy() for place, experts in truth.routes[0].items()}]
    before = set(routes[0][1, 0][0, 5].tolist())
    after = sorted(expert for expert in range(4) if expert not in before)[: len(before)]
    routes[0][1, 0][0, 5] = after
    astray = run((plan, settings, False, None, routes))
    check = judge(plan, [astray], [truth, other])
    assert check.flips >= 1 and check.difference > check.allowed and not check.passed

    reviewed = check_runs(plan, settings, [astray], [truth, other], run)
    assert reviewed is not None and reviewed.difference <= reviewed.allowed
    assert reviewed.tie_gap is not None and reviewed.passed == tied
    assert reviewed.tie_gap == 0 if tied else reviewed.tie_gap > 1e-4


def test_steps_after_a_flip_are_not_compared(pool: Pool) -> None:
    """Whose gradients differ by a token: in a layout, or in the second run of one process."""
    settings = TrainSettings(Recipe(steps=3), "float32", options=RunOptions(check=True))
    plan = plan_of("dp=2")
    truth, other = alone(pool, plan, settings)
    runs = pool.run_each([(run_rank, (plan, settings))] * plan.layout.world)

    def steps() -> int:
        found = judge(plan, runs, [truth, other]).gradients
        return 0 if found is None else found.steps

    assert steps() == 3
    other.routes[2][2, 0][0, 5, 0] += 1
    assert steps() == 2
    runs[1].routes[1][2, 0][0, 5, 0] += 1
    assert steps() == 1
    other.routes[0][2, 1][0, 5, 0] += 1
    assert steps() == 0 and judge(plan, runs, [truth, other]).passed


def test_a_plan_that_is_not_kept_is_seen(pool: Pool) -> None:
    settings = TrainSettings(Recipe(steps=3), "float64")
    plan = plan_of("dp=2")
    _, runs = trained(pool, plan, settings)
    assert runs[1].memory is not None
    runs[1].memory = replace(runs[1].memory, padding=8)
    calls, size = runs[1].traffic[1]["fsdp"]
    runs[1].traffic[1]["fsdp"] = AxisTraffic(calls, size + 1)
    measured = compare_with_plan(plan, settings, runs)
    assert measured is not None and measured.memory is not None
    assert (measured.memory.rank, measured.memory.num_as_planned, measured.step) == (1, 1, 2)
    assert not measured.traffic_as_planned and measured.traffic != measured.planned_traffic


def batches_of(plan: Plan, rank: int, first: int) -> list[TokenBatch]:
    """A rank's microbatches of the step that begins with a sample."""
    return reader_of(plan, TrainSettings(), rank, torch.device("cpu")).step(first).of(0)


@pytest.mark.parametrize("layout", ["dp=2", "dp=4", "pp=2", "dp=2 tp=2"])
def test_the_text_of_a_step_is_the_same_on_every_layout(layout: str) -> None:
    one, plan = plan_of("dp=1", seq=700), plan_of(layout, seq=700)
    wanted = batches_of(one, rank=0, first=5)
    ranks = range(plan.layout.world)
    coords = {plan.layout.coord(rank).dp: rank for rank in ranks}
    by_rank = [batches_of(plan, coords[dp], first=5) for dp in range(plan.layout.dp)]
    found = [batch for microbatch in zip(*by_rank, strict=True) for batch in microbatch]
    for name in ("tokens", "labels", "positions"):
        rows, truth = (torch.cat([getattr(one, name) for one in some]) for some in (found, wanted))
        assert rows.equal(truth)
    starts = [
        [each.documents.starts for each in some if each.documents] for some in (found, wanted)
    ]
    assert len(starts[0]) == len(found) and sum(starts[0], ()) == sum(starts[1], ())


def test_documents_do_not_see_one_another() -> None:
    plan = plan_of("dp=1", seq=2000, batch=400)
    batches = batches_of(plan, rank=0, first=0)
    rows = [one for one in batches if one.documents is not None and one.positions[0, -1] < 1999]
    assert len(rows) > 10  # of 400 rows in 12 MB and 700 documents
    for batch in rows:
        assert batch.documents is not None
        (start, *_) = (batch.positions[0] == 0).nonzero().flatten().tolist()[1:]
        assert batch.positions[0, :start].tolist() == list(range(start))
        assert batch.documents.starts[0][:2] == (0, start)
        assert batch.labels[0, start - 1] == -100  # nobody knows what the next file is
        assert batch.labels[0, start] == batch.tokens[0, start + 1]


def command(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    with pytest.raises(SystemExit) as stop:
        main(["train", *words.split()])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_command_says_every_step_and_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--layout dp=2 ep=2 --set layers=2 --seq 32 --batch 8 --steps 10 --set lr=3e-3 --check"
    words += " --dtype float64"
    code, out, _ = command(words, capsys)
    assert code == 0 and "PASS in" in out and "differs" not in out
    step = (
        r"^step (\d+)/10 \| loss (\d\.\d{4}) \| norm \d+\.\d\d \| lr \d\.\de-0\d \| "
        r"(?:\d+ ms|\d+\.\d s) \| [\d.]+k? tok/s \(plan [\d.]+k?\) \| "
        r"mem \d\.\d GiB \(plan \d\.\d\)( \| eta \d+s)? \| "
        r"fullest expert \d\.\dx$"
    )
    found = re.findall(step, out, re.M)
    assert [int(number) for number, _, _ in found] == list(range(1, 11))
    assert float(found[-1][1]) < float(found[0][1]) - 0.5  # it learns
    assert "2 of 2 ranks hold what was planned, to the byte" in out
    assert "every step as planned" in out and re.search(r"^ep +[\d,]+ +[\d,]+ ", out, re.M)
    assert re.search(r"^routing flips: \d+ of 2,560 ", out, re.M)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command("tiny --layout dp=2 --seq 16 --steps 2 --dtype float64 --json", capsys)
    table = json.loads(out)
    assert code == 0 and table["check"] is None
    assert (table["model"], table["layout"], table["world"]) == ("tiny", "dp=2", 2)
    assert (table["dtype"], table["zero"], table["schedule"]) == ("float64", 3, "1f1b")
    assert [each["step"] for each in table["steps"]] == [1, 2]
    assert table["steps"][0].keys() >= {"step", "loss", "norm", "lr", "seconds", "fullest"}
    assert (Path(table["run"]) / "summary.json").is_file()
    assert table["summary"]["num_steps"] == 2 and not table["stopped"]
    assert table["memory"]["planned"] == table["memory"]["measured"]
    assert table["memory"]["ranks_as_planned"] == 2 and table["traffic"]["match"]
    assert table["traffic"]["planned"] == table["traffic"]["measured"]
    assert "standard library" in table["corpus"] and table["seconds"] > 0


def test_memory_snapshots_without_a_gpu_are_refused_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "tiny --layout dp=2 --seq 8 --batch 2 --steps 1 --set log=memory --out run"
    code, _, err = command(words, capsys)
    assert code == 0 and err.splitlines() == [
        "fivefold: log = memory writes nothing: a snapshot shows the memory of a GPU, and this run "
        "has none"
    ]
    assert not (tmp_path / "run" / "memory").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--layout dp=2 --dtype bfloat8", "unknown --dtype 'bfloat8'"),
        ("--layout dp=2 --steps 0", "steps = 0: at least 1"),
        ("--layout dp=2 --set lr=nan", "lr = nan: above 0"),
        ("--layout dp=2 --seed -1", "seed = -1: at least 0"),
        ("--layout dp=2 --until 0", "--until 0: give a number above 0"),
        ("--set stpes=3", "unknown key 'stpes': did you mean steps"),
        ("--layout dp=2 --layout-typo", "No such option"),
        ("--layout dp=2 --resume", "no run of tiny-moe in runs to resume"),
        ("--resume --check", "leave --resume out"),
        ("--set data=nowhere", "nowhere"),
        ("--device cuda", "this machine has no GPU"),
        ("--layout tp=3", "tp=3 does not divide heads 8"),
        ("--layout dp=128", "at most 64 ranks"),
        ("--layout pp=2 --schedule pipedream", "choose another, such as 1f1b"),
        ("--set vocab=255", "the model knows 255"),
        ("no-such-plan.toml", "no such plan file"),
    ],
)
def test_bad_input_exits_with_2(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(words, capsys)
    assert code == 2 and not out and reason in err


@contextmanager
def training(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A long run in a process of its own, which has said two steps."""
    words = ["train", "--layout", "dp=2 ep=2", "--steps", "5000", "--seq", "16", "--out", "run"]
    words += more
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell starts its background jobs with interrupts ignored, and children inherit that.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "fivefold", *words]
    with subprocess.Popen(command, text=True, preexec_fn=heard, cwd=folder, **pipes) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("step 2/5000 |"):
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def test_a_lost_rank_is_named_and_no_process_is_left(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        with within(SOON):
            _, err = process.communicate(timeout=4 * SOON)
    assert process.returncode == 1
    (line,) = err.splitlines()
    where = r"fivefold: lost rank 1 at (data of )?step \d+( 0[FB]\d.*)?"
    assert re.match(rf"{where}: it was killed by SIGKILL", line)
    wait_until_gone(ranks)
    (start,) = json.loads((tmp_path / "run/run.json").read_text())["starts"]
    assert "ended" not in start and f"fivefold: {start['failed']['why']}" == line


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_is_asked_to_stop_keeps_what_there_is(tmp_path: Path, how: signal.Signals) -> None:
    if signal.getsignal(how) is signal.SIG_IGN:  # as under nohup: the training would inherit it
        signal.signal(how, signal.SIG_DFL)
    with training(tmp_path, "--check") as process:
        ranks = children(process.pid)
        process.send_signal(how)
        with within(SOON):
            out, _ = process.communicate(timeout=4 * SOON)
    assert process.returncode == 0
    wait_until_gone(ranks)
    done = int(re.findall(r"^step (\d+)/", out, re.M)[-1])
    compared = re.search(r"^compared: (\d+) steps? that both had run", out, re.M)
    assert compared and 1 <= int(compared[1]) <= done and "\nPASS in " in out
    checkpoint = tmp_path / f"run/checkpoints/step-{done:08d}"
    assert latest(tmp_path / "run") == checkpoint and "asked to stop" in out
    # The position is that of the last step, whatever was read ahead of it.
    last = read_records(tmp_path / "run" / "metrics.jsonl")[-1]
    manifest = json.loads((checkpoint / "manifest.json").read_text("utf-8"))
    assert manifest["facts"]["samples"] == last.first_sample + last.num_samples
    assert last.step == done and last.first_sample == (done - 1) * last.num_samples


def test_a_check_compares_the_steps_that_all_have_run() -> None:
    """A request to stop reaches the ranks and the one process in different steps."""
    plan = plan_of("dp=2")
    short, long = TrainedRank(losses=[3.0, 2.0]), TrainedRank(losses=[3.0, 2.0, 1.0])
    for runs, truth in (([short, short], long), ([long, long], short)):
        with pytest.raises(ValueError, match=r"shorter|longer"):  # nobody asked: one is incomplete
            judge(plan, runs, [truth])
        check = judge(plan, [replace(run, stopped=True) for run in runs], [truth])
        assert check.passed and check.steps == 2 and check.loss == 2.0
    wrong = replace(short, losses=[3.0, 2.5], stopped=True)
    assert not judge(plan, [wrong, wrong], [long]).passed
