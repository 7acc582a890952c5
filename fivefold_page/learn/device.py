"""Learn: what training keeps in memory, counted in GPUs that it would fill.

    view(params) -> {"choices", "chip", "limit", "parameters", "parts", "frames", "sentences"}

Every frame adds one part. Bytes are those of the planner's estimate for one GPU with everything on
it, one sequence a microbatch and nothing recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fivefold.core import counted
from fivefold.core import hardware as machine
from fivefold.core.model import parameters
from fivefold.core.model import presets as models
from fivefold.planner import Estimate
from fivefold.render import bar, gib, wrapped
from fivefold_page import Params, View
from fivefold_page.explore import ALONE
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines

TITLE = "What training keeps, in GPUs"
CHOICES: Mapping[str, Choice] = {
    "model": Choice(
        "Model",
        ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "deepseek-v3"),
        "llama-3.1-70b",
    ),
    "machine": Choice("GPU of", ("h100", "a100-40g", "gb200"), "h100"),
    "seq": Choice("Tokens of a sequence", ("2048", "8192"), "8192"),
}
_MEANS = {
    "weights": "weights, which the matmuls read",
    "gradients": "gradients, which add up over the microbatches of a step",
    "master": "a float32 copy of the weights, so that small changes are not rounded away",
    "optimizer": "the optimizer's two moments of every parameter",
    "activations": "activations of one sequence, for the backward pass",
}


def view(params: Params) -> View:
    """The parts of the memory, one after the other."""
    choices = chosen(CHOICES, params)
    shape, gpu = models.load(choices["model"]), machine.load(choices["machine"])
    seq = min(int(choices["seq"]), shape.max_seq)
    state = replace(ALONE, model=choices["model"], machine=choices["machine"], seq=seq)
    estimate, total = state.estimate(), parameters(shape).total
    memory, recomputed = estimate.memory, replace(state, recompute="full").estimate()
    parts = [
        {"name": name, "means": means, "bytes": memory[name]} for name, means in _MEANS.items()
    ]
    return {
        "choices": choices,
        "chip": gpu.chip,
        "limit": gpu.memory,
        "parameters": total,
        "parts": parts,
        "frames": [_frame(parts[: index + 1], gpu.memory, total) for index in range(len(parts))],
        "sentences": _sentences(parts, total, estimate, recomputed),
    }


def _frame(parts: list[View], limit: float, total: int) -> View:
    last = parts[-1]
    size = sum(part["bytes"] for part in parts)
    per_parameter = (
        "" if last["name"] == "activations" else f", {last['bytes'] / total:.0f} bytes each"
    )
    verb = "These are" if last["name"] == "weights" else "With"
    says = (
        f"{verb} {last['means']}: {gib(last['bytes'])}{per_parameter}. "
        f"Together {gib(size)}: {_gpus(size, limit)}."
    )
    return {"says": says, "shown": len(parts), "bytes": size}


def _gpus(size: float, limit: float) -> str:
    if size <= limit:
        return f"{size / limit:.0%} of one GPU of {gib(limit)}"
    return f"more than {counted(math.ceil(size / limit) - 1, 'GPU')} of {gib(limit)} can hold"


def _sentences(
    parts: list[View], total: int, estimate: Estimate, recomputed: Estimate
) -> list[str]:
    limit = estimate.setting.machine.memory
    state_bytes = sum(part["bytes"] for part in parts[:-1])
    activations = parts[-1]["bytes"]
    return [
        f"{total / 1e9:.1f} billion parameters at {state_bytes / total:.0f} bytes each: "
        f"{gib(state_bytes)}, whatever the batch. To use a trained model the weights alone "
        f"suffice: {gib(parts[0]['bytes'])}.",
        f"Activations, {gib(activations)}, grow with the tokens that are computed at once. "
        f"Recomputing all of them leaves {gib(recomputed.memory['activations'])}, and makes a step "
        f"{recomputed.step / estimate.step:.2f} times as long.",
        f"These bytes fill {counted(math.ceil((state_bytes + activations) / limit), 'GPU')}, if "
        "they can be cut so that none is stored twice. How to cut them is what the next chapters "
        "are about.",
    ]


def text(view: View) -> list[str]:
    """The same for a terminal."""
    total = sum(part["bytes"] for part in view["parts"])
    lines = [
        f"{view['choices']['model']}, {view['parameters'] / 1e9:.1f} B parameters, on "
        f"{view['chip']} of {gib(view['limit'])}",
        "",
    ]
    for part in view["parts"]:
        lines.append(bar(part["name"], gib(part["bytes"]), part["bytes"] / total))
    captions = (line for frame in view["frames"] for line in wrapped(frame["says"]))
    return [*lines, "", *captions, "", *sentence_lines(view)]
