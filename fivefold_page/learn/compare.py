"""Learn: techniques alone and together, on the same job: memory, time and what it is spent on.

    view(params) -> {"choices", "machine", "limit", "batch", "rows", "frames", "sentences"}

Every row is a plan that the planner estimates, and every frame speaks of one row. A technique that
the job does not allow has a reason instead of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fivefold.core import hardware as machine
from fivefold.render import duration, gib, percent, table, wrapped
from fivefold_page import Params, View
from fivefold_page.explore import ALONE
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines

TITLE = "The same job, by each technique"
CHOICES: Mapping[str, Choice] = {
    "model": Choice("Model", ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), "llama-3.1-70b"),
    "gpus": Choice("GPUs", ("8", "64", "512"), "64"),
    "recompute": Choice("Recomputation", ("selective", "full"), "selective"),
}
_ROWS_PER_GPU, _FEWEST = 2, 64  # sequences of a step


@dataclass(frozen=True)
class Technique:
    """A way to split, and what it is for."""

    title: str
    says: str
    keys: Mapping[str, Any]


TECHNIQUES: Mapping[str, Technique] = {
    "data": Technique("data alone", "Every GPU has everything.", {"zero": 0}),
    "zero-1": Technique("data, ZeRO 1", "Optimizer states are sharded.", {"zero": 1}),
    "zero-3": Technique("data, ZeRO 3", "Weights and gradients are sharded too.", {"zero": 3}),
    "tensor": Technique(
        "tensor and data", "Matrices are sharded inside a node.", {"tp": 8, "zero": 1}
    ),
    "pipeline": Technique(
        "pipeline and data", "Layers are split into 8 stages.", {"pp": 8, "zero": 1}
    ),
    "context": Technique(
        "context and data", "Tokens of each sequence are sharded.", {"cp": 8, "zero": 1}
    ),
    "two": Technique(
        "tensor, pipeline and data",
        "Matrices inside a node, layers between nodes.",
        {"tp": 4, "pp": 4, "zero": 1},
    ),
    "more": Technique(
        "tensor, pipeline, context and data",
        "The tokens are sharded as well.",
        {"tp": 4, "pp": 4, "cp": 2, "zero": 1},
    ),
}
_SPENT = {
    "compute": "arithmetic",
    "bubble": "waiting in the pipeline",
    "tp": "tensor traffic",
    "cp": "context traffic",
    "pp": "pipeline traffic",
    "dp": "data traffic",
    "optimizer": "the optimizer",
    "launch": "launching kernels",
}


def view(params: Params) -> View:
    """The job by every technique."""
    choices = chosen(CHOICES, params)
    limit = machine.load(ALONE.machine).memory
    rows = [_row(name, tuple(choices.items())) for name in TECHNIQUES]
    return {
        "choices": choices,
        "machine": ALONE.machine,
        "limit": limit,
        "batch": _batch(int(choices["gpus"])),
        "rows": rows,
        "frames": [
            {"says": _words(row, limit), "row": row_index} for row_index, row in enumerate(rows)
        ],
        "sentences": _sentences(rows, limit),
    }


def _batch(gpus: int) -> int:
    return max(_FEWEST, _ROWS_PER_GPU * gpus)


@cache
def _row(name: str, pairs: tuple[tuple[str, str], ...]) -> View:
    technique, choices = TECHNIQUES[name], dict(pairs)
    gpus = int(choices["gpus"])
    same: dict[str, Any] = {key: choices[key] for key in ("model", "recompute")}
    state = replace(ALONE, gpus=gpus, batch=_batch(gpus), **same, **technique.keys)
    row: View = {"name": name, "title": technique.title, "says": technique.says}
    degrees = state.tp * state.pp * state.cp
    if degrees > gpus:
        return row | {"problem": f"it takes at least {degrees} GPUs"}
    if problems := state.problems():
        return row | {"problem": "; ".join(problems)}
    estimate = state.estimate()
    axes = ("dp", "tp", "pp", "cp")
    degrees_text = " ".join(f"{a}={getattr(state, a)}" for a in axes if getattr(state, a) > 1)
    return row | {
        "problem": "",
        "layout": f"{degrees_text} with ZeRO {state.zero}" if state.zero else degrees_text,
        "memory": estimate.total,
        "verdict": estimate.verdict,
        "step": estimate.step,
        "step_text": duration(estimate.step),
        "mfu": estimate.mfu,
        "parts": estimate.breakdown(),
        "address": state.params(),
    }


def _words(row: View, limit: float) -> str:
    head = f"{row['title'][0].upper()}{row['title'][1:]}. {row['says']}"
    if row["problem"]:
        return f"{head} Not for this job: {row['problem']}."
    parts = {name: part for name, part in row["parts"].items() if name != "compute"}
    worst = max(parts, key=lambda name: parts[name], default="")
    spent = f", {_SPENT.get(worst, worst)} takes {duration(parts[worst])}" if worst else ""
    return (
        f"{head} {gib(row['memory'])} of {gib(limit)}: {row['verdict']}. A step of "
        f"{duration(row['step'])}{spent}; MFU {percent(row['mfu'])}."
    )


def _sentences(rows: list[View], limit: float) -> list[str]:
    fitting = [row for row in rows if not row["problem"] and row["verdict"] == "fits"]
    if not fitting:
        return [
            f"None of these rows fits into {gib(limit)}: recompute more, or take more GPUs. The "
            "planner knows more layouts than these."
        ]
    fast = min(fitting, key=lambda row: row["step"])
    lean = min(fitting, key=lambda row: row["memory"])
    return [
        f"The fastest of these that fits: {fast['title']}, {fast['layout']}, "
        f"{duration(fast['step'])} a step.",
        f"The leanest: {lean['title']}, {lean['layout']}, {gib(lean['memory'])}.",
        "All with the 1F1B schedule, microbatches of one sequence and our own kernels. A step of "
        "what does not fit is what it would take if it did. The planner searches all others too.",
    ]


def text(view: View) -> list[str]:
    """The same for a terminal."""
    choices = view["choices"]
    rows = [
        (row["title"], "", row["problem"], "", "")
        if row["problem"]
        else (
            row["title"],
            gib(row["memory"]),
            row["verdict"],
            duration(row["step"]),
            percent(row["mfu"]),
        )
        for row in view["rows"]
    ]
    return [
        f"{choices['model']} on {choices['gpus']} GPUs of {view['machine']}, "
        f"{view['batch']} sequences a step",
        "",
        *table([("technique", "memory", "verdict", "step", "MFU"), *rows]),
        "",
        *(line for frame in view["frames"] for line in wrapped(frame["says"])),
        "",
        *sentence_lines(view),
    ]
