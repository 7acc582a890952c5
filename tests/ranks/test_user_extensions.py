"""Callbacks, optimizers, schedules, mixers and machines of a user, who changes no file of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.commands.train import TrainedRun
from tests.commands import in_fork

CODE = '''
import torch
import fivefold as ff
from fivefold.core.schedule import family


class Counter(ff.Callback):
    def __init__(self):
        self.steps, self.losses = 0, []

    def setup(self, rank):
        self.rank = rank
        assert rank.plan.layout.world == 2 and len(rank.modules) == 1

    def after_step(self, number):
        self.steps += 1

    def on_record(self, record):
        self.losses.append(record.loss)

    def finish(self):
        if self.rank.rank == 0:
            self.rank.report(f"{self.steps} steps, {len(self.losses)} records")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Breaks(ff.Callback):
    def after_step(self, number):
        raise ArithmeticError("of a user")


class Momentum(torch.optim.Optimizer):
    """Torch's SGD with momentum, whose numbers a test knows."""

    states = ("velocity",)

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                velocity = self.state[weight]["velocity"]
                decayed = weight.grad.add(weight, alpha=group["weight_decay"])
                velocity.mul_(0.9).add_(decayed)
                weight.add_(velocity, alpha=-group["lr"])


class NoStates(Momentum):
    states = None


class OtherStates(Momentum):
    states = ("velocity",)

    def step(self):
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["other"] = torch.zeros_like(weight)


def gpipe(stages, microbatches, chunks):
    return [
        " ".join(f"{stage}{kind}{m}" for kind in "FB" for m in range(microbatches))
        for stage in range(stages)
    ]


FAMILY = family("gpipe")


def backwards_first(stages, microbatches, chunks):
    return [" ".join(f"{stage}{kind}0" for kind in "BF") for stage in range(stages)]


def too_few(stages, microbatches, chunks):
    return gpipe(stages, 1, chunks)


def nothing(stages, microbatches, chunks):
    return None


class MeanOfRow(ff.Mixer, name="test-mean-by-path"):
    def table(self, shape):
        values = ff.MixerWeight("v", (shape.width, shape.width), "heads")
        return values, ff.MixerWeight("out", (shape.width, shape.width), "heads", "mixed")

    def mix(self, shape, tensors, tokens):
        sums = tensors["v"].cumsum(1)
        return sums / (1 + tokens.positions[..., None]).to(sums.dtype)
'''
SMALL = {"layout": "dp=2", "seq": 32, "batch": 4, "data": "synthetic"}
WORDS = ["--layout", "dp=2", "--seq", "32", "--batch", "4", "--set", "data=synthetic"]
MIXER = {"mixer": "own/code.py:MeanOfRow", "positions": "none", "kv_heads": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which `own/code.py` is; all tests run there, and the file is loaded once."""
    path = tmp_path_factory.mktemp("user")
    (path / "own").mkdir()
    (path / "own" / "code.py").write_text(CODE)
    (path / "own" / "broken.py").write_text("1 / 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


def train(**keys: Any) -> tuple[TrainedRun, list[str]]:
    told: list[Any] = []
    run = ff.train("tiny", on_progress=told.append, **SMALL, **keys)
    return run, [each for each in told if isinstance(each, str)]


def test_a_callback_counts_steps_over_a_resume(folder: Path) -> None:
    words = [*WORDS, "--out", "runs/counted", "--set", "steps=4 callbacks=own/code.py:Counter"]
    done = in_fork(["train", "tiny", *words, "--until", "2"], folder)
    assert done.returncode == 0 and "2 steps, 2 records" in done.stderr, done.stderr
    plan = folder / "runs/counted/plan.toml"
    assert 'callbacks = "../../own/code.py:Counter"' in plan.read_text()
    done = in_fork(["train", str(plan), "--out", "runs/counted", "--resume"], folder)
    assert done.returncode == 0 and "4 steps, 2 records" in done.stderr, done.stderr
    (manifest,) = (folder / "runs/counted/checkpoints").glob("step-*4/manifest.json")
    assert json.loads(manifest.read_text())["facts"]["callbacks"] == {"Counter": {"steps": 4}}


def test_values_are_callbacks_in_python(folder: Path) -> None:
    """Of a script, whose classes ranks know; two of one class, which keep two states."""
    script = folder / "own" / "script.py"
    keys = f"out='runs/values', on_progress=print, steps=2, **{SMALL}"
    start = f"    ff.train('tiny', callbacks=[Counter(), Counter()], {keys})\n"
    code = CODE.replace("test-mean-by-path", "test-mean-of-script")
    script.write_text(f"{code}\n\nif __name__ == '__main__':\n{start}")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=folder)
    assert done.stdout.count("2 steps, 2 records") == 2, done.stderr
    (manifest,) = (folder / "runs/values/checkpoints").glob("step-*2/manifest.json")
    states = json.loads(manifest.read_text())["facts"]["callbacks"]
    assert states == {"Counter": {"steps": 2}, "Counter#1": {"steps": 2}}


def test_an_error_in_a_callback_ends_the_run(folder: Path) -> None:
    with pytest.raises(ff.RankLost, match="raised ArithmeticError: of a user"):
        train(out="runs/broken", steps=2, callbacks="own/code.py:Breaks")


def test_a_check_needs_no_callbacks_of_the_single_process(folder: Path) -> None:
    run, told = train(out="runs/checked", steps=2, check=True, callbacks="own/code.py:Counter")
    assert run.passed and "2 steps, 2 records" in told


@pytest.mark.parametrize(
    "changes", [{}, {"zero": 1}, {"offload": "cpu"}, {"states": "bf16"}], ids=str
)
def test_an_optimizer_has_the_planned_bytes(folder: Path, changes: dict[str, Any]) -> None:
    name = "-".join(changes) or "plain"
    keys = {**changes, "steps": 3, "lr": 0.01, "seed": 3}
    run, _ = train(out=f"runs/own-{name}", optimizer="own/code.py:Momentum", **keys)
    sgd, _ = train(out=f"runs/sgd-{name}", optimizer="sgd", **keys)
    assert run.losses == pytest.approx(sgd.losses, rel=1e-6)
    if "memory" in run.to_json() and run.measured.memory is not None:
        assert run.measured.memory.planned == run.measured.memory.measured


def test_an_optimizer_is_resumed_and_planned(folder: Path) -> None:
    keys = {"optimizer": "own/code.py:Momentum", "steps": 4, "lr": 0.01}
    straight, _ = train(out="runs/straight", **keys)
    train(out="runs/resumed", until=2, **keys)
    resumed, _ = train(out="runs/resumed", resume=True, **keys)
    assert (*straight.losses[2:],) == pytest.approx(resumed.losses, rel=1e-6)
    sizes = [
        ff.plan("tiny", machine="h100", optimizer=name, layout="dp=1", zero=0).estimate.memory
        for name in ("sgd", "own/code.py:Momentum", "adamw")
    ]
    assert sizes[0] == sizes[1] and sizes[0]["optimizer"] < sizes[2]["optimizer"]


def test_a_schedule_trains_and_is_priced(folder: Path) -> None:
    keys = {"layout": "pp=2", "microbatches": 4, "machine": "h100", "seq": 32}
    own, gpipe = (ff.plan("tiny", schedule=name, **keys) for name in ("own/code.py:gpipe", "gpipe"))
    assert own.plan.schedule.order == gpipe.plan.schedule.order
    assert own.estimate.step == pytest.approx(gpipe.estimate.step, rel=1e-3)
    shared = {**SMALL, "layout": "pp=2", "steps": 2, "check": True}
    assert ff.train("tiny", out="runs/order", schedule="own/code.py:gpipe", **shared).passed
    done = in_fork(["plan", "runs/order/plan.toml"], folder)
    assert done.returncode == 0 and "own/code.py:gpipe" in done.stdout, done.stderr


def test_a_mixer_by_its_path_is_known_to_every_command(folder: Path) -> None:
    settings = " ".join(f"{key}={value}" for key, value in MIXER.items())
    words = [*WORDS, "--out", "runs/mixed", "--set", f"steps=2 {settings}"]
    done = in_fork(["train", "tiny", *words, "--check"], folder)
    assert done.returncode == 0, done.stderr
    assert 'mixer = "../../own/code.py:MeanOfRow"' in (folder / "runs/mixed/plan.toml").read_text()
    done = in_fork(["verify", "runs/mixed/plan.toml", "--steps", "1"], folder)
    assert done.returncode == 0, done.stderr


def test_a_machine_in_no_file_is_planned_and_trained(folder: Path) -> None:
    machine = replace(ff.machine("h100"), name="ours", memory=50e9)
    run = ff.train("tiny", out="runs/machine", machine=machine, steps=1, **SMALL)
    assert ff.plan(folder / "runs/machine/plan.toml").plan.machine == machine == run.plan.machine


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("callbacks=own/codes.py:Counter", "there is no file own/codes.py"),
        ("callbacks=own/code.py:Count", "did you mean Counter?"),
        ("callbacks=own/code.py:Momentum", "give a subclass of ff.Callback"),
        ("callbacks=own/broken.py:Any", "raised ZeroDivisionError: division by zero"),
        ("callbacks=Counter", "give classes as FILE.py:NAME"),
        ("optimizer=own/code.py:Counter", "give a subclass of torch.optim.Optimizer"),
        ("optimizer=own/code.py:NoStates", "states is missing"),
        ("optimizer=adamww", "did you mean adamw?"),
        ("schedule=own/code.py:nothing layout=pp=2", "return a list with a text"),
        ("schedule=own/code.py:too_few layout=pp=2", "another schedule than for 2 stages"),
        ("schedule=own/code.py:backwards_first layout=pp=2 microbatches=1", "deadlock"),
        ("mixer=own/code.py:Counter", "a mixer is a class with a name"),
    ],
)
def test_what_cannot_be_used_is_refused(folder: Path, setting: str, words: str) -> None:
    done = in_fork(["train", "tiny", "--seq", "32", "--out", "runs/no", "--set", setting], folder)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert not (folder / "runs/no").exists()


def test_states_that_were_not_declared_are_refused(folder: Path) -> None:
    with pytest.raises(ff.RankLost, match="made the state 'other'"):
        train(out="runs/undeclared", steps=1, optimizer="own/code.py:OtherStates")


def test_what_ranks_cannot_receive_is_refused(folder: Path) -> None:
    class Local(ff.Callback):
        """Of no module."""

    with pytest.raises(ff.FivefoldError, match="cannot be sent to the ranks"):
        train(callbacks=[Local()])
    with pytest.raises(ff.FivefoldError, match="give values of subclasses"):
        train(callbacks=[Local])
    with pytest.raises(ff.FivefoldError, match="is in no file that another process could load"):
        ff.plan("tiny", optimizer=Local)
