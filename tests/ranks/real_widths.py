"""Models of their published widths, cut to a few layers, in every class of layout on this CPU.

    python -m tests.ranks.real_widths

trains all of them and prints a table in markdown; the tests take a sample. Each case has the
defaults of a user: its ranks train two steps with copies compared in each, save, and resume for a
third step with copies compared as seldom as usual. All steps are held against one process, as
`train --check` does. Then one gradient of the first step is made wrong by 1e-3 on all ranks, which
the check must notice.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from fivefold import step as step_module
from fivefold.core.layout.weight_table import weights
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.composition import Job
from fivefold.records.run_writer import RunFolder
from fivefold.train.check import Check, judge, reference_runs
from fivefold.train.loop import run_rank
from fivefold.train.options import RunOptions
from fivefold.train.state import TrainedRank, TrainSettings

HEAD = """# Verified widths

Models of their published widths, cut to {layers} layers (4 where a schedule has two stages a rank),
a vocabulary of {vocab} and {experts} experts of which a token has {top_k}, with the defaults of a
user in every class of layout, ZeRO stage and schedule: {rows} sequences of {seq} tokens a step,
float32. Each trains {first} steps with copies compared in each of them, saves, and resumes for step
{steps}. No copy may differ, and losses and gradients must be those of one process, within three
times what another order of sums changes in it. The gradient shown is the one that is nearest to its
limit; `off` and `allowed` are shares of its norm. In the last columns one gradient of the first
step is scaled by {scale} on all ranks: the check must fail. Made by `make verify-all` on {date}.
"""
COLUMNS = (
    "model", "layout", "ZeRO", "schedule", "loss off, nats", "allowed", "gradient, step", "off",
    "allowed", "flips", "wrong gradient", "seen as", "seconds", "",
)  # fmt: skip
STEPS, FIRST_STEPS = 3, 2
LAYERS, VOCAB, EXPERTS, TOP_K, ROWS, SEQ = 2, 512, 4, 2, 4, 32
WRONG_SCALE = 1.001
MOST_RANKS = 8
_PATIENCE = 240.0  # seconds: many ranks share few cores
_FINER = ("interleaved", "zb-v", "dualpipe", "dualpipe-v")  # two stages a rank
GEMMA = json.dumps(
    {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
    }
)
MODELS = {
    "qwen3": "qwen3-0.6b",
    "llama": "llama-3.2-1b",
    "olmoe": "olmoe-1b-7b",
    "deepseek": "deepseek-v2-lite",
    "gemma": GEMMA,
}


@dataclass(frozen=True)
class Case:
    """One class of layout."""

    model: str
    layout: str
    zero: int | None = None
    schedule: str | None = None
    context: str | None = None
    sp: bool = True

    def __str__(self) -> str:
        stage = "" if self.zero is None else f"zero={self.zero}"
        words = (self.model, self.layout, stage, self.schedule, self.context)
        return " ".join([*filter(None, words), *([] if self.sp else ["no-sp"])])

    @property
    def layers(self) -> int:
        return 2 * LAYERS if self.schedule in _FINER else LAYERS

    def plan(self, layout: str | None = None) -> Plan:
        """The same model and text in this layout, or in another."""
        chosen = {} if self.schedule is None or layout else {"schedule": self.schedule}
        chosen |= {} if self.context is None or layout else {"context": self.context}
        routed = self.model in ("olmoe", "deepseek")
        experts = {"moe.experts": str(EXPERTS), "moe.top_k": str(TOP_K)} if routed else {}
        options = PlanOptions(
            MODELS[self.model],
            layout=layout or self.layout,
            zero=None if layout else self.zero,
            sp=self.sp,
            seq=SEQ,
            batch=ROWS,
            microbatch_size=1,
            set={"layers": str(self.layers), "vocab": str(VOCAB), **experts},
            **chosen,
        )
        return resolve(options)


CASES = (
    Case("qwen3", "dp=2", zero=0),
    Case("qwen3", "dp=2", zero=1),
    Case("qwen3", "dp=2", zero=2),
    Case("qwen3", "dp=2"),
    Case("qwen3", "dp=2x2"),
    Case("qwen3", "dp=2x2", zero=1),
    Case("qwen3", "tp=2"),
    Case("qwen3", "tp=2", sp=False),
    Case("qwen3", "pp=2"),
    Case("qwen3", "pp=2", schedule="gpipe"),
    Case("qwen3", "pp=2", schedule="interleaved"),
    Case("qwen3", "pp=2", schedule="zb-h1"),
    Case("qwen3", "pp=2", schedule="zb-v"),
    Case("qwen3", "pp=2", schedule="dualpipe"),
    Case("qwen3", "pp=2", schedule="dualpipe-v"),
    Case("qwen3", "cp=2"),
    Case("qwen3", "cp=2", context="ring"),
    Case("qwen3", "cp=2", context="ulysses"),
    Case("qwen3", "dp=2 tp=2"),
    Case("qwen3", "dp=2 tp=2", zero=1),
    Case("qwen3", "dp=2 pp=2"),
    Case("qwen3", "dp=2 pp=2", zero=3),
    Case("qwen3", "dp=2 cp=2"),
    Case("qwen3", "tp=2 pp=2"),
    Case("qwen3", "tp=2 cp=2"),
    Case("qwen3", "dp=2 tp=2 pp=2"),
    Case("qwen3", "tp=2 pp=2 cp=2", schedule="zb-h1"),
    Case("llama", "dp=2 tp=2", zero=1),
    Case("llama", "tp=2 pp=2"),
    Case("llama", "tp=4"),
    Case("gemma", "dp=2 tp=2", zero=1),
    Case("gemma", "cp=2 pp=2"),
    Case("olmoe", "dp=2 ep=2"),
    Case("olmoe", "dp=2 cp=2 ep=2", zero=1),
    Case("olmoe", "dp=2 pp=2 ep=2", schedule="zb-h1"),
    Case("deepseek", "dp=2 ep=2", zero=1),
    Case("deepseek", "dp=2 tp=2 ep=2 etp=2"),
    Case("deepseek", "dp=2 tp=2 pp=2 ep=2"),
)


class Outcome(NamedTuple):
    """What was found of a case: healthy, and with a wrong gradient."""

    healthy: Check
    planted: Check
    tensor: str
    seconds: float

    @property
    def passed(self) -> bool:
        gradients, wrong = self.healthy.gradients, self.planted.gradients
        compared = gradients is not None and self.healthy.passed
        return compared and wrong is not None and not wrong.passed and wrong.tensor == self.tensor


def with_a_wrong_gradient(
    worker: Worker, plan: Plan, settings: TrainSettings, tensor: str
) -> TrainedRank:
    """One rank of a training whose gradient of one weight is summed, and then scaled."""
    inner = step_module.sum_copies

    def sum_copies(job: Job) -> None:
        inner(job)
        for each in job.owned:
            if job.table[each.row.name].name == tensor:
                each.grad.mul_(WRONG_SCALE)

    with patch.object(step_module, "sum_copies", sum_copies):
        return run_rank(worker, plan, settings)


@dataclass
class Trainings:
    """Trains cases on a pool, and keeps what one process has shown for each model."""

    pool: Pool
    known: dict[tuple[str, int], list[TrainedRank]] = field(
        default_factory=dict[tuple[str, int], list[TrainedRank]]
    )

    def examine(self, case: Case, resumes: bool = True) -> Outcome:
        """Train, resume and compare; then plant, and compare again."""
        references, began = self.references(case), time.perf_counter()
        plan = case.plan()
        with tempfile.TemporaryDirectory() as parent:
            healthy = self._train(plan, Path(parent) / "run" if resumes else None)
        names = [weight.name for weight in weights(plan.shape)]
        tensor = names[7 * CASES.index(case) % len(names)]
        settings = self.settings(Recipe(steps=STEPS), until=1)
        tasks = [(with_a_wrong_gradient, (plan, settings, tensor))] * plan.layout.world
        first = [replace(one, losses=one.losses[:1], routes=one.routes[:1]) for one in references]
        planted = judge(plan, self.pool.run_each(tasks), first)
        checked = judge(plan, healthy, references)
        return Outcome(checked, planted, tensor, time.perf_counter() - began)

    def references(self, case: Case) -> list[TrainedRank]:
        """One process alone, and a second time with sums in another order."""
        key = (case.model, case.layers)
        if key not in self.known:
            plan, settings = case.plan("dp=1"), self.settings(Recipe(steps=STEPS))
            tasks = [(run_rank, each) for each in reference_runs(plan, settings)]
            self.known[key] = self.pool.run_each(tasks)
        return self.known[key]

    def settings(self, recipe: Recipe, until: int | None = None) -> TrainSettings:
        return TrainSettings(recipe, "float32", options=RunOptions(check=True, until=until))

    def _train(self, plan: Plan, folder: Path | None) -> list[TrainedRank]:
        """All steps of all ranks, in two starts where there is a folder for a checkpoint."""
        watched, usual = Recipe(steps=STEPS, compare_every=1), Recipe(steps=STEPS)
        if folder is None:
            return self._start(plan, self.settings(watched))
        before = self.settings(watched, until=FIRST_STEPS)
        runs = self._start(plan, replace(before, folder=folder))
        resumed = self.settings(usual)
        options = replace(resumed.options, resume=True)
        later = self._start(plan, replace(resumed, folder=folder, options=options))
        assert all(run.first_step == FIRST_STEPS + 1 for run in later)
        return [
            replace(
                run,
                losses=run.losses + after.losses,
                routes=run.routes + after.routes,
                sketches=run.sketches | after.sketches,
            )
            for run, after in zip(runs, later, strict=True)
        ]

    def _start(self, plan: Plan, settings: TrainSettings) -> list[TrainedRank]:
        """One start of all ranks, as the command does it."""
        if settings.folder is not None:
            toml = plan.to_toml(settings.folder, full=True)
            RunFolder.create(settings.folder, toml, {}, settings.options.resume)
        return self.pool.run_each([(run_rank, (plan, settings))] * plan.layout.world)


def main() -> int:
    """The table; the exit code."""
    numbers = {"layers": LAYERS, "vocab": VOCAB, "experts": EXPERTS, "top_k": TOP_K}
    numbers |= {"rows": ROWS, "seq": SEQ, "first": FIRST_STEPS, "steps": STEPS}
    print(HEAD.format(date=date.today(), scale=WRONG_SCALE, **numbers))
    _print([*COLUMNS], ["---"] * len(COLUMNS))
    torch.set_num_threads(1)  # a fork after parallel work in the parent would hang its ranks
    began, passed = time.perf_counter(), list[bool]()
    with Pool(MOST_RANKS, _PATIENCE) as pool:
        trainings = Trainings(pool)
        for case in CASES:
            outcome = trainings.examine(case)
            passed.append(outcome.passed)
            _print([*_cells(case), *_result(outcome)])
    print(f"\n{sum(passed)} of {len(passed)} cases pass")
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    return 0 if all(passed) else 1


def _cells(case: Case) -> list[object]:
    plan = case.plan()
    words = [case.layout, case.context, None if case.sp else "no-sp"]
    schedule = plan.schedule.name if plan.layout.pp > 1 else ""
    name = "gemma-2-2b" if case.model == "gemma" else plan.shape.name  # that of no preset
    return [name, " ".join(filter(None, words)), plan.layout.zero, schedule]


def _result(outcome: Outcome) -> list[object]:
    check, wrong = outcome.healthy, outcome.planted.gradients
    losses = [f"{check.difference:.0e}", f"{check.allowed:.0e}"]
    nearest = ["", "", ""]
    if (found := check.gradients) is not None:
        nearest = [f"`{found.tensor}`, {found.step}", f"{found.difference:.0e}"]
        nearest.append(f"{found.allowed:.0e}")
    seen = "" if wrong is None else f"{wrong.difference:.1e}"
    said = [f"`{outcome.tensor}`", seen, f"{outcome.seconds:.0f}"]
    return [*losses, *nearest, check.flips, *said, "pass" if outcome.passed else "FAIL"]


def _print(*lines: Sequence[object]) -> None:
    for cells in lines:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
