"""Prose of the last chapters: all dimensions at once, one layer under them, and how to choose.

Each function returns the paragraphs of a chapter; all numbers come from the code that plans.
"""

from __future__ import annotations

from fivefold.core import counted
from fivefold.render import duration, gib
from fivefold_page import View
from fivefold_page.learn import compare, landscape, serving, trainers
from fivefold_page.learn import layer as layer_panel
from fivefold_page.learn.chapters_states import gpu
from fivefold_page.learn.lesson import size_text

_STATES = ("weights", "gradients", "optimizer")


def five() -> list[str]:
    """All five dimensions on one grid of ranks."""
    view = landscape.view({})
    choices, frames = view["choices"], view["frames"]
    first, last = frames[0]["holds"], frames[-1]["holds"]
    sums = [sum(holds[name] for name in _STATES) for holds in (first, last)]
    world = int(choices["dp"]) * int(choices["cp"]) * int(choices["tp"]) * int(choices["pp"])
    product = " · ".join(choices[axis] for axis in ("dp", "cp", "tp", "pp"))
    return [
        "The dimensions multiply. A layout names a degree for each axis, and every rank has a "
        "coord on each: it belongs to one tp group, one cp group, one dp group and one pipeline. "
        "The number of ranks is dp · cp · tp · pp. ep does not count: experts are spread over "
        "ranks that exist already.",
        f"{choices['model']} with dp={choices['dp']} cp={choices['cp']} tp={choices['tp']} "
        f"pp={choices['pp']} ep={choices['ep']} runs on {product} = {world} ranks. Weights, "
        f"gradients and optimizer states take {gib(sums[0])} on one device, and {gib(sums[1])} on "
        f"rank 0. The activations between two layers shrink from "
        f"{size_text(first['activations'])} to {size_text(last['activations'])}. Step through the "
        "picture to see which dimension cut what.",
        "The order matters. Ranks with neighbouring numbers are in the same node, so tp, which "
        "talks in every layer and waits, gets neighbours; then cp; then dp and pp, which talk "
        "rarely or little and may cross the network.",
    ]


def layer() -> list[str]:
    """One layer of one rank, station by station."""
    view = layer_panel.view({})
    moves = [move for station in view["stations"] for move in _sent(station)]
    count = sum(move["count"] for move in moves)
    size = sum(move["count"] * move["bytes"] for move in moves)
    ranks = counted(view["world"], "rank")
    return [
        f"The picture follows one microbatch through one layer of {view['choices']['model']}, on "
        f"rank 0 of {ranks}: first forward, then backward. Each station shows the shape and size "
        "of what the rank holds there, and what it sends.",
        f"In this one layer rank 0 takes part in {count} collectives and gives {size_text(size)} "
        "to them. They come in pairs: where the forward pass gathers, the backward pass reduces "
        "and scatters, and the other way round. What is gathered in one direction has to be summed "
        "in the other.",
        "Switch a dimension off, by setting its degree to 1: its station stays, and moves nothing. "
        "One device runs the same program, only without anybody to talk to.",
    ]


def _sent(station: View) -> list[View]:
    moves = (*station["forward"], *station["backward"])
    return [move for move in moves if move["kind"] != "recv"]


def choose() -> list[str]:
    """Rules of thumb, and each technique alone and together in numbers."""
    view = compare.view({})
    rows, choices = {row["name"]: row for row in view["rows"]}, view["choices"]
    fitting = [row for row in view["rows"] if row["verdict"] == "fits"]
    alone, best = rows["data"], min(fitting, key=lambda row: row["step"])
    return [
        "First it has to fit, then it has to be fast. Rules of thumb: ZeRO stage 1 at least. tp up "
        "to the size of a node, until the weights fit. pp across nodes, if that does not suffice "
        "and the batch has enough microbatches. cp where sequences are so long that their "
        "activations do not fit. ep where the model has experts. dp is what is left. "
        "Recomputation and ZeRO stage 3 trade time for memory at any point, and may do without the "
        "others.",
        f"{choices['model']} on {choices['gpus']} H100s of {gib(gpu().memory)}, {view['batch']} "
        f"sequences a step: data parallelism alone would need {gib(alone['memory'])} on each. The "
        f"fastest that fits of the rows below is {best['title']}, {best['layout']}: "
        f"{gib(best['memory'])}, and {duration(best['step'])} a step. The first command says so.",
        "Rules of thumb miss much: how schedules, batch and recomputation play together. The "
        "planner, in the second command, estimates every legal layout of the same job, simulates "
        "the best, and says why the first one won and what each neighbour would lose. The other "
        "tab, Explore, shows the same for any job.",
    ]


def serving_answers() -> list[str]:
    """Prefill and decode, the cache, and which dimension helps which."""
    view = serving.view({})
    choices, rows = view["choices"], {row["name"]: row for row in view["rows"]}
    tensor, pipeline = rows["tensor"], rows["pipeline"]
    rates = [view["prompt"] / view["prefill"], 1 / view["step"]]
    return [
        "An answer has two parts. In prefill all tokens of the prompt pass through the model at "
        "once, as in training. In decode the model draws one token, appends it and starts again: a "
        "forward for each token. So that nothing is computed twice, the keys and values of all "
        "earlier tokens are kept, layer by layer: the KV cache.",
        f"{choices['model']} on {view['gpus']} H100s with {tensor['layout']}: "
        f"{view['prompt']:,} tokens of a prompt take an estimated {duration(view['prefill'])}, "
        f"{rates[0]:,.0f} a second. One token of the answer takes {duration(view['step'])}, "
        f"{rates[1]:,.0f} a second. "
        "Decode has little to compute and reads all weights for it, so memory bandwidth is its "
        "limit. The cure is company: many answers at a time read the weights once.",
        f"How many fit is a matter of the cache, {size_text(view['memory']['token'])} a token on "
        f"each GPU here. With {choices['answers']} answers at a time {tensor['layout']} gives each "
        f"a token every {tensor['tpot_text']}, and {pipeline['layout']} one every "
        f"{pipeline['tpot_text']}: tp makes a step shorter, pp only lets others follow. Across "
        "nodes, where tp would wait for the network, pp is what is left.",
    ]


def other_trainers() -> list[str]:
    """The dimensions that other trainers have, and when that was read."""
    known, rows = trainers.trainers(), {row["name"]: row for row in trainers.rows()}
    lacking = [
        f"{trainer.name} has no {' and no '.join(none)} parallelism"
        for key, trainer in known.items()
        if (none := [axis for axis in ("pipeline", "context") if rows[axis][key] == "none"])
    ]
    dates = sorted(trainer.date for trainer in known.values())
    return [
        "Most trainers name the same dimensions and mean slightly different things by them. The "
        "table asks each one the same questions: how it splits the batch, matrices, layers, "
        "sequences and experts, and what it knows before a run and proves after it.",
        f"It is what {len(known)} other trainers say of themselves, in the files and commits "
        f"below, read from {dates[0]} to {dates[-1]}. {'; '.join(lacking)}: its jobs have to fit "
        "with the dimensions that are left. Where scale, kernels or kinds of models decide, others "
        "are ahead of fivefold, and the last row says how far each has been taken.",
        "The planner can price a job as another stack would run it: the command below estimates "
        "one layout with the kernels and the overlap of TorchTitan in place of our own.",
    ]
