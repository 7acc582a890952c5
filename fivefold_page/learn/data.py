"""Learn: one step with ZeRO, unit by unit: the memory of every data rank, and its collectives.

    view(params) -> {"choices", "ranks", "layers", "units", "bytes", "optimizer", "stages",
                     "frames", "sentences"}

Each frame has the collectives that start in it; `live` and `peak` are bytes of each rank.
`data_steps.py` makes the frames, and defines the states of weights and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fivefold.core import counted
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost.memory import StaticMemory, static_bytes
from fivefold.cost.traffic import chunks_of, predict_traffic
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.data_steps import GRAD_ITEMSIZE, ITEMSIZE, DataStep, name_of
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines, size_text

TITLE = "Data: ZeRO fetches, computes, discards"
CHOICES: Mapping[str, Choice] = {
    "model": Choice(
        "Model", ("tiny", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), "llama-3.1-8b"
    ),
    "dp": Choice("Data ranks", ("2", "4", "8"), "4"),
    "zero": Choice("ZeRO stage", ("0", "1", "2", "3"), "3"),
    "gather": Choice("Stage 3 gathers once a", ("microbatch", "step"), "microbatch"),
    "microbatches": Choice("Microbatches", ("1", "2", "3", "4"), "1"),
}
NUM_LAYERS = 4
STATES = 12  # bytes per parameter: a float32 copy and the two moments of AdamW
_UNIT_SIZES = {"tiny": 0.1}  # MB: by default, blocks below 25 MB would be joined to one unit
_MARKS = {"whole": "#", "arriving": ">", "slice": ".", "filling": "f", "summing": "s"}


def view(params: Params) -> View:
    """One step of the chosen plan as frames, and the four ZeRO stages compared."""
    choices = chosen(CHOICES, params)
    plan = plan_of(choices)
    step = _data_step(plan)
    stages = [_stage({**choices, "zero": str(zero)}) for zero in range(4)]
    return {
        "choices": choices,
        "ranks": plan.layout.dp,
        "layers": [NUM_LAYERS, resolve(PlanOptions(choices["model"])).shape.layers],
        "units": [
            {"name": name_of(unit), "elements": unit.size, "slice": unit.shard_size}
            for unit in step.units
        ],
        "bytes": {"weights": ITEMSIZE, "gradients": GRAD_ITEMSIZE, "optimizer": STATES},
        "optimizer": {"state": "slice" if plan.layout.zero else "whole", "bytes": step.states},
        "stages": stages,
        "frames": step.frames,
        "sentences": _sentences(choices, stages),
    }


def plan_of(choices: Mapping[str, str]) -> Plan:
    """The plan of these choices: data ranks only, and few layers of the model."""
    return resolve(
        PlanOptions(
            choices["model"],
            layout=f"dp={choices['dp']}",
            zero=int(choices["zero"]),
            gather=choices["gather"],
            microbatches=int(choices["microbatches"]),
            unit_size=_UNIT_SIZES.get(choices["model"]),
            set={"layers": str(NUM_LAYERS)},
        )
    )


def static_memory(plan: Plan, rank: int) -> StaticMemory:
    """The memory of a rank before the optimizer runs."""
    return static_bytes(plan, rank, itemsize=ITEMSIZE, optimizer="adamw", master=True)


def accumulating(plan: Plan, rank: int) -> int:
    """Bytes of a rank between two microbatches: below stage 2, gradients accumulate unsharded,
    even though the optimizer of stage 1 gets shards."""
    size = static_memory(plan, rank).device
    if plan.layout.zero >= 2:
        return size
    (chunk,) = chunks_of(plan, rank, ITEMSIZE)
    return size + GRAD_ITEMSIZE * sum(unit.size - unit.shard_size for unit in chunk.units)


def _data_step(plan: Plan) -> DataStep:
    (chunk,) = chunks_of(plan, 0, ITEMSIZE)
    ranks = [static_memory(plan, rank) for rank in range(plan.layout.dp)]
    states = [rank_bytes.master + rank_bytes.optimizer + rank_bytes.scalars for rank_bytes in ranks]
    step = DataStep(plan, chunk.units, states)
    step.run()
    return step


def _stage(choices: Mapping[str, str]) -> View:
    """The memory and the traffic of one ZeRO stage, for the comparison."""
    plan = plan_of(choices)
    step = _data_step(plan)
    numel = sum(unit.size - unit.padding for unit in step.units)
    traffic = predict_traffic(plan, 0, itemsize=ITEMSIZE)
    size = accumulating(plan, 0)
    return {
        "zero": plan.layout.zero,
        "per_parameter": size / numel,
        "accumulating": size,
        "standing": static_memory(plan, 0).device,
        "peak": step.frames[-1]["peak"][0],
        "sent": round(sum(entry.sent for entry in traffic)),
    }


def _sentences(choices: Mapping[str, str], stages: list[View]) -> list[str]:
    sizes = ", ".join(f"ZeRO-{stage['zero']} {stage['per_parameter']:.2f}" for stage in stages)
    peaks = ", ".join(size_text(stage["peak"]) for stage in stages)
    moved = ", ".join(size_text(stage["sent"]) for stage in stages)
    plain = plan_of({**choices, "zero": "0"})
    num_parameters = static_memory(plain, 0).weights // ITEMSIZE
    in_bf16 = replace(plain, units=replace(plain.units, grad_dtype="bf16"))
    narrow = static_memory(in_bf16, 0).device / num_parameters
    microbatches = counted(int(choices["microbatches"]), "microbatch")
    return [
        f"Bytes a parameter while gradients add up, over {choices['dp']} ranks: {sizes}. Whole "
        f"they are {ITEMSIZE} for a weight, {GRAD_ITEMSIZE} for its gradient and {STATES} for a "
        "float32 copy and two moments; with gradients summed in bf16 ZeRO-0 would hold "
        f"{narrow:.2f}.",
        _slices_words(choices, stages[1]),
        f"At its fullest a rank holds {peaks} under ZeRO-0 to 3: whole gradients on their way, "
        "and under ZeRO-3 the whole weights of two units, come on top of what a rank holds before "
        "the optimizer. That much also comes with a deeper model, of which it is a smaller part.",
        f"In a step of {microbatches} a rank sends {moved} under ZeRO-0 to 3. Stages 0 and 1 pay "
        "once a step; 2 sums, and 3 gathers too, for every microbatch.",
        "Activations are not drawn, for no stage of ZeRO shares them; nor is the gradient of a "
        "weight before it is added to the buffer of its unit.",
    ]


def _slices_words(choices: Mapping[str, str], stage: View) -> str:
    """When stage 1 has full gradients, and when shards."""
    summary = (
        "ZeRO-1 keeps gradients whole until the last backward, and gives slices of them to the "
        f"optimizer: {size_text(stage['accumulating'])} while they add up, "
        f"{size_text(stage['standing'])} before it."
    )
    if choices["microbatches"] != "1":
        return summary
    return (
        f"{summary} In a step of 1 microbatch nothing adds up: each unit is summed as soon as it "
        f"is complete, and {size_text(stage['peak'])} is the most."
    )


def text(view: View) -> list[str]:
    """The same for a terminal: one line per frame, then the ZeRO stages."""
    names = [unit["name"] for unit in view["units"]]
    shown, layers = view["layers"]
    lines = [
        f"{view['choices']['model']}, {shown} of {layers} layers, dp={view['ranks']}, "
        f"ZeRO-{view['choices']['zero']}: units {', '.join(names)}",
        "weights: # whole, > arriving, . slice; gradients: f filling, s summing, # whole, . slice",
        "",
        f"{'frame':23}weights gradients{'now':>10}{'peak':>11}  moves, with a rank's input",
    ]
    for frame_index, frame in enumerate(view["frames"]):
        lines += wrapped(_line(frame_index, frame, names), later=" " * 62)
    lines += [
        "",
        f"{'':8}{'while gradients add up':>28}{'before':>16}",
        f"{'stage':8}{'bytes/parameter':>16}{'bytes':>12}{'the optimizer':>16}{'peak':>12}"
        f"{'sends':>12}",
    ]
    for stage in view["stages"]:
        memory = f"{size_text(stage['accumulating']):>12}{size_text(stage['standing']):>16}"
        cells = f"{size_text(stage['peak']):>12}{size_text(stage['sent']):>12}"
        lines.append(f"ZeRO-{stage['zero']:<3}{stage['per_parameter']:>16.2f}{memory}{cells}")
    return [*lines, "", *sentence_lines(view)]


def _line(frame_index: int, frame: View, names: list[str]) -> str:
    weights = "".join(_MARKS[word] for word in frame["weights"])
    gradients = "".join(_MARKS[states[-1]] if states else " " for states in frame["gradients"])
    kinds = dict.fromkeys(move["word"] for move in frame["moves"])
    moved = ", ".join(
        f"{'' if move['unit'] is None else names[move['unit']] + ' '}{size_text(move['bytes'])}"
        for move in frame["moves"]
    )
    unit = frame["computes"]
    what = frame["phase"] if unit is None else f"{frame['phase']} {names[unit]}"
    sizes = f"{size_text(frame['live'][0]):>10}{size_text(frame['peak'][0]):>11}"
    line = (
        f"{frame_index + 1:>3} {what:18} {weights:7} {gradients:9}{sizes}  {''.join(kinds)} {moved}"
    )
    return line.rstrip()
