"""The path through Learn: chapters in order, each a question, from one GPU to five dimensions.

    view(name) -> {"name", "question", "number", "total", "paragraphs", "analogy", "commands",
                   "panel", "start", "before", "after"}

A chapter has a few paragraphs, an analogy, a panel of Learn to play with, and commands that do the
same for real. Every number of the prose is computed when the chapter is asked for. Texts are lists
of parts, in which the first use of each word of the glossary is marked (`glossary.linked`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from fivefold.core import Machine, UnknownName, counted
from fivefold.core import hardware as machine
from fivefold.core.model import load, parameters, training_flops
from fivefold.cost.traffic import Collective, message_bytes, predict_traffic
from fivefold.planner import Estimate
from fivefold.render import duration, gib, percent, wrapped
from fivefold_page import Params, View
from fivefold_page.explore import ALONE, State
from fivefold_page.learn import compare, landscape, serving, trainers
from fivefold_page.learn import context as context_panel
from fivefold_page.learn import expert as expert_panel
from fivefold_page.learn import layer as layer_panel
from fivefold_page.learn import pipeline as pipeline_panel
from fivefold_page.learn.glossary import linked
from fivefold_page.learn.lesson import size_text

SMALL, MIDDLE, LARGE = "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"
STATES = ("weights", "gradients", "master", "optimizer")
_YEAR = 365.25  # days
_ITEMSIZE = 2  # bytes of a bf16 number
_GIB = 2**30


def gpu() -> Machine:
    """The GPU that the chapters speak of."""
    return machine.load(ALONE.machine)


def states_bytes(estimate: Estimate) -> float:
    """Bytes of weights, gradients and optimizer states on the fullest rank."""
    return sum(estimate.memory[name] for name in STATES)


def sent_bytes(state: State, *axes: str) -> float:
    """Bytes that rank 0 sends over these axes in a step; over all of them if none is given."""
    listed = predict_traffic(state.plan(), 0, itemsize=_ITEMSIZE)
    return sum(collective.sent for collective in listed if not axes or collective.axis in axes)


def one_gpu() -> list[str]:
    """Memory and time of a large model on one GPU."""
    estimate = ALONE.estimate()
    shape, memory = ALONE.shape(), estimate.memory
    numbers = parameters(shape)
    sizes = {name: round(memory[name] / numbers.total) for name in STATES}
    flops = training_flops(shape, ALONE.seq).total
    years = estimate.days(ALONE.tokens) / _YEAR
    return [
        f"Training keeps much more than the weights. For each parameter it keeps the weight "
        f"itself in bf16 ({sizes['weights']} bytes), its gradient ({sizes['gradients']}), a more "
        f"exact copy in float32 ({sizes['master']}) and two moments of the optimizer "
        f"({sizes['optimizer']}): {sum(sizes.values())} bytes. {shape.name} has "
        f"{numbers.total / 1e9:.1f} billion parameters, so this takes "
        f"{gib(states_bytes(estimate))}. The activations of one sequence of {ALONE.seq:,} tokens "
        f"need {gib(memory['activations'])} more.",
        f"An H100 has {gib(gpu().memory)}. Not even the weights fit, which are "
        f"{gib(memory['weights'])}. And if they did, time would not suffice: one token costs "
        f"{flops / 1e9:,.0f} billion FLOPs, forward and backward. At the {percent(estimate.mfu)} "
        f"of its peak that we estimate, one H100 would read {ALONE.tokens / 1e12:.0f} trillion "
        f"tokens in {years:,.0f} years.",
        "So the work has to be split over many GPUs, and there is more than one way to cut it: by "
        "sequences, by matrices, by layers, by tokens, by experts. Those are the five dimensions. "
        "Each has its price, since what was cut has to meet again. The next chapters add one after "
        "the other.",
    ]


def collectives() -> list[str]:
    """What a collective is, and what it costs near and far."""
    near, far = gpu().tiers[0], gpu().tiers[-1]
    sent = {ranks: Collective("dp", "all_reduce", _GIB, ranks).sent for ranks in (8, 1024)}
    fast, slow = (sent[8] / tier.bandwidth for tier in (near, far))
    return [
        "Every GPU runs the same program as one rank, with its own number and its own memory, and "
        "sees nothing of the others. Data moves only in a collective: all ranks of a group call "
        "it, each gives its part, and each gets its result. There are six kinds, and all of this "
        "page is made of them: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, and "
        "a plain send and receive.",
        f"The price is bytes over links. To add up 1 GiB over 8 ranks (an all-reduce), each of "
        f"them sends {sent[8] / _GIB:.2f} GiB. Over NVLink, inside a node of "
        f"{gpu().gpus_per_node} H100s, that takes at least {duration(fast)}; over the network "
        f"between nodes, {duration(slow)}. That factor of {slow / fast:.0f} decides most layouts: "
        "those who talk most are put next to each other.",
        f"More ranks hardly cost more bytes: with 1,024 ranks each sends "
        f"{sent[1024] / _GIB:.2f} GiB. But "
        "the number of steps grows, everybody waits for the slowest, and no bytes are better than "
        "few. Where nothing depends on the result yet, a good program computes on meanwhile: this "
        "is overlap.",
    ]


def data() -> list[str]:
    """Data parallelism: faster, and no memory saved."""
    single_state = replace(ALONE, model=SMALL, batch=64)
    eight = replace(single_state, gpus=8)
    alone, together = single_state.estimate(), eight.estimate()
    return [
        "Data parallelism gives every rank the full model and a share of the batch. Each computes "
        "the gradients of its own sequences, one all-reduce adds them up, and every rank makes the "
        "same step of the optimizer. So all copies stay equal, and the result is that of one GPU "
        "with the whole batch.",
        f"{SMALL} with a batch of {single_state.batch} sequences: one H100 takes an estimated "
        f"{duration(alone.step)} a step. On 8 of them each computes {single_state.batch // 8} "
        f"sequences, sends {gib(sent_bytes(eight, 'dp-cp'))} of gradients once a step, and the "
        f"step takes {duration(together.step)}: {alone.step / together.step:.1f} times as fast. "
        f"Most of the sending overlaps with the backward pass; "
        f"{duration(together.breakdown().get('dp', 0.0))} of it can be seen.",
        f"It has two limits. The batch: a rank needs at least one sequence, and a batch that is "
        f"too large learns less from each token. And memory: on 8 ranks, each still holds all "
        f"{gib(states_bytes(together))} of weights, gradients and optimizer states.",
    ]


def zero() -> list[str]:
    """The three stages of ZeRO, in bytes kept and bytes sent."""
    stages = [replace(ALONE, model=MIDDLE, gpus=8, batch=64, zero=stage) for stage in range(4)]
    estimates = [state.estimate() for state in stages]
    state_sizes = [gib(states_bytes(estimate)) for estimate in estimates]
    sent = [gib(sent_bytes(state)) for state in stages]
    verdicts = [estimate.verdict for estimate in estimates]
    first = verdicts.index("fits") if "fits" in verdicts else None
    fits = "no stage fits" if first is None else f"from stage {first} on it fits"
    return [
        "With data parallelism every rank keeps the same optimizer states, and only one copy of "
        "them is needed. ZeRO shards what is the same: stage 1 the states of the optimizer, stage "
        "2 the gradients too, stage 3 the weights too. A rank then updates its own shard only, "
        "and an all-gather brings the new weights to all.",
        f"{MIDDLE} over 8 ranks: a rank keeps {state_sizes[0]} of weights, gradients and optimizer "
        f"states without ZeRO, {state_sizes[1]} in stage 1, {state_sizes[2]} in stage 2 and "
        f"{state_sizes[3]} in stage 3. With activations the totals are "
        f"{', '.join(gib(estimate.total) for estimate in estimates)}; an H100 has "
        f"{gib(gpu().memory)}, so {fits}.",
        "Stage 1 is free: a reduce-scatter of gradients and an all-gather of weights take the "
        "place of the all-reduce, and weights in bf16 are smaller than gradients in float32. Of "
        f"{stages[0].batch} sequences in {stages[0].plan().batch.microbatches} microbatches a rank "
        f"sends {sent[0]} a step without ZeRO and {sent[1]} in stage 1, but {sent[2]} in stage 2 "
        f"and {sent[3]} in stage 3: these move gradients, and stage 3 also weights, once for each "
        "microbatch. Weights are gathered one flat unit ahead of the computation, and dropped "
        "after it.",
    ]


_EXPERTS = "mixtral-8x7b"
_LONG = 131_072  # tokens
# Tensor ranks alone, without sequence parallelism; a microbatch is one sequence.
_APART = replace(ALONE, gpus=8, tp=8, zero=1, batch=8, also="sp=false")


def tensor() -> list[str]:
    """Tensor parallelism: matrices sharded by columns, then by rows."""
    single_estimate, tensor_estimate = ALONE.estimate(), _APART.estimate()
    near, far = gpu().tiers[0], gpu().tiers[-1]
    sent = sent_bytes(_APART, "tp") / _APART.batch
    compute = tensor_estimate.breakdown()["compute"] / _APART.batch
    layers, heads = _APART.shape().layers, _APART.shape().heads
    return [
        "Tensor parallelism cuts every matrix. The first matmul of a pair is sharded by columns: "
        "each rank computes some columns of the result and needs nobody. The second is sharded by "
        "rows: each rank multiplies what it has, and the sum of all results is the answer. So two "
        "matrices take one all-reduce instead of two.",
        f"{LARGE} over {_APART.tp} ranks: weights, gradients and optimizer states shrink from "
        f"{gib(states_bytes(single_estimate))} to {gib(states_bytes(tensor_estimate))} on each "
        "rank. But ranks talk in every layer, twice forward and twice backward. For one sequence "
        f"of {_APART.seq:,} tokens through {layers} layers a rank sends {gib(sent)}.",
        f"And they wait for it, since the next matmul needs the sum. That is at least "
        f"{duration(sent / near.bandwidth)} over NVLink and {duration(sent / far.bandwidth)} over "
        f"the network, where the arithmetic itself takes "
        f"{duration(compute)}. So keep tp inside a node: on an H100, at most "
        f"{near.size}. The {heads} heads of attention have to be divisible by it.",
    ]


def sequence() -> list[str]:
    """Sequence parallelism: the same bytes on the wire, fewer activations."""
    pair = (_APART, replace(_APART, also=""))
    before, after = (state.estimate().memory["activations"] for state in pair)
    ways = [gib(sent_bytes(state, "tp") / state.batch) for state in pair]
    return [
        "Between two pairs of sharded matrices are norms, sums and copies. With tensor parallelism "
        "alone every tp rank has all tokens there, computes the same as the others, and keeps the "
        "same activations.",
        "Sequence parallelism gives each tp rank its own tokens in between. Before a pair of "
        "matrices an all-gather brings the tokens together; after it a reduce-scatter adds up and "
        "gives each rank its own tokens back. An all-reduce is exactly those two, so the forward "
        "pass moves no byte more.",
        f"{LARGE} over {_APART.tp} ranks, one sequence of {_APART.seq:,} tokens: activations fall "
        f"from {gib(before)} to {gib(after)}. A rank sends {ways[0]} without and {ways[1]} with "
        "it: gathered tokens are not kept, but gathered once more in the backward pass. It is on "
        "by default wherever tp is above 1.",
    ]


def pipeline() -> list[str]:
    """Pipeline parallelism: bubble, memory and messages."""
    view = pipeline_panel.view({"schedules": "zero-bubble"})
    racers = {racer["name"]: racer for racer in view["racers"]}
    plain, best = racers["1f1b"], racers["zb-v"]
    stages, microbatches = (int(view["choices"][key]) for key in ("stages", "microbatches"))
    cut = replace(ALONE, gpus=8, pp=8, zero=1, batch=32, recompute="selective")
    large_state = replace(cut, batch=128)
    message = message_bytes(cut.plan(), _ITEMSIZE)
    bubbles = [percent(state.estimate().bubble) for state in (cut, large_state)]
    return [
        "Pipeline parallelism gives each rank consecutive layers, a stage. The batch is cut into "
        "microbatches, which pass from stage to stage: forward, then backward. While rank 0 works "
        "on the third microbatch, rank 2 works on the first.",
        f"At the start and at the end ranks have nothing to do: the bubble. With {stages} ranks "
        f"and {microbatches} microbatches, 1F1B idles {percent(plain['bubble'])} of the time. "
        "Other schedules cut the backward pass in two, the input gradient, which the stage before "
        "is waiting for, and the weight gradient, which fills gaps: zb-v idles "
        f"{percent(best['bubble'])} and keeps {best['peak']:g} microbatches of activations, as "
        f"1F1B does with {plain['peak']:g}. More microbatches help too: {LARGE} in {cut.pp} "
        f"stages idles an estimated {bubbles[0]} with {cut.batch} and {bubbles[1]} with "
        f"{large_state.batch}.",
        f"A pipeline sends little: between two stages go {size_text(message)} for each microbatch "
        "forward, as much backward, and only to the neighbour. So it is the "
        "dimension that crosses nodes. Its price is the bubble, and the first rank, which keeps "
        "the activations of the most microbatches.",
    ]


def context() -> list[str]:
    """Context parallelism: a long sequence, dealt out evenly."""
    single_state = replace(ALONE, model=MIDDLE, seq=_LONG, batch=1)
    eight = replace(single_state, gpus=8, cp=8, zero=1)
    before, after = (state.estimate() for state in (single_state, eight))
    rows = {row["kind"]: row for row in context_panel.view({})["compared"]}
    ranks = len(rows["ring"]["pairs"])
    return [
        f"No other dimension shortens one sequence. {MIDDLE} at {_LONG:,} tokens keeps "
        f"{gib(before.memory['activations'])} of activations for a single sequence. Context "
        "parallelism shards its tokens: over 8 ranks each keeps "
        f"{gib(after.memory['activations'])}.",
        "Almost all of a layer looks at one token alone. Only attention does not: a token looks "
        "at all tokens before it. So the keys and values travel: around a ring, hop by hop, each "
        "rank computing with what just arrived while the next part is on its way; or gathered at "
        "once; or, with Ulysses, by an all-to-all after which each rank has all tokens of a few "
        f"heads. Here a rank sends {gib(sent_bytes(eight, 'ring'))} a step.",
        f"The last tokens look back at many, the first at few. Cut into {ranks} plain parts, ranks "
        f"are busy {percent(rows['ring']['busy'])} of the time. Zigzag gives each rank an early "
        f"and a late part: {percent(rows['zigzag']['busy'])}.",
    ]


def expert() -> list[str]:
    """Expert parallelism: tokens travel to weights."""
    shape = load(_EXPERTS)
    moe, numbers = shape.moe, parameters(shape)
    assert moe is not None, f"{_EXPERTS} has experts"
    single_state = replace(ALONE, model=_EXPERTS, gpus=8, zero=1, batch=8)
    eight = replace(single_state, ep=8)
    weights = [state.estimate().memory["weights"] for state in (single_state, eight)]
    tokens = eight.seq * eight.batch // eight.gpus
    sent = sent_bytes(eight, "ep") / shape.num_moe_layers
    load_of = expert_panel.view({})["numbers"]
    return [
        f"A mixture of experts has several MLPs in a layer, and a router that picks a few for each "
        f"token. {_EXPERTS} has {moe.experts} and picks {moe.top_k}: of its "
        f"{numbers.total / 1e9:.1f} billion parameters a token uses {numbers.active / 1e9:.1f} "
        "billion. The arithmetic is that of a small model, the memory that of a large one.",
        "Expert parallelism puts the experts on different ranks, and tokens travel: an all-to-all "
        "carries each token to the ranks of its experts, a second one carries the results back. "
        f"With 8 ranks a rank holds {gib(weights[1])} of weights instead of {gib(weights[0])}. "
        f"For {tokens:,} tokens it sends {gib(sent)} in each layer, forward and backward together.",
        "No extra ranks are needed: the ranks that split the batch share the experts among them. "
        "The weak spot is load. In the picture below the fullest expert has "
        f"{load_of['imbalance']:.2f} times the mean, and the layer takes as long as the fullest "
        "rank.",
    ]


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


_PLACES = ("chapter", "panel", "frame")  # keys of an address that are no choices of a panel


@dataclass(frozen=True)
class Chapter:
    """A question, its answer, and the panel that shows it, with the choices that it opens with."""

    question: str
    prose: Callable[[], list[str]]
    analogy: str
    panel: str
    commands: tuple[str, ...]
    start: Mapping[str, str] = field(default_factory=dict[str, str])


# In the order of the path. One chapter of each panel opens it with its defaults: `chapter_of`.
CHAPTERS: dict[str, Chapter] = {
    "one-gpu": Chapter(
        "Why does one GPU not suffice?",
        one_gpu,
        "One cook in one kitchen is asked for a banquet: the ingredients do not fit on the "
        "shelves, and the night has too few hours.",
        "device",
        ("fivefold plan llama-3.1-70b --layout dp=1 --machine h100",),
    ),
    "collectives": Chapter(
        "How do GPUs share what they computed?",
        collectives,
        "Cooks in separate kitchens only talk by telephone, at fixed points of the recipe. A call "
        "begins when all of them have picked up, and who needs its result waits for it.",
        "collectives",
        ("fivefold verify tiny --layout dp=2",),
    ),
    "data": Chapter(
        "What if the batch is split?",
        data,
        "Every kitchen has the same cookbook and gets a share of the orders. At the end of the "
        "evening all report how each dish turned out, average the reports, and write the same "
        "corrections into their books.",
        "data",
        ("fivefold verify tiny --layout dp=4 --zero 0",),
        {"model": "llama-3.1-8b", "zero": "0"},
    ),
    "zero": Chapter(
        "What if the optimizer's memory is split?",
        zero,
        "The kitchens still cook different orders, but keep only one volume of the cookbook each. "
        "For every dish they copy the page from the kitchen that has it, cook, and throw the copy "
        "away.",
        "data",
        ("fivefold verify tiny --layout dp=4 --zero 3",),
    ),
    "tensor": Chapter(
        "What if every matrix is split?",
        tensor,
        "A pot is too large for one stove, so that several cooks make the same dish, each a part "
        "of its ingredients in a pot of their own. Before the next step of the recipe they must "
        "pour everything together.",
        "tensor",
        ("fivefold verify tiny --layout tp=2 --set sp=false",),
        {"sp": "off"},
    ),
    "sequence": Chapter(
        "Who keeps what lies between the matrices?",
        sequence,
        "Between two shared pots the dish is on plates. Each of the cooks seasons only the plates "
        "on their side, instead of every cook seasoning a full copy of all plates.",
        "tensor",
        ("fivefold verify tiny --layout tp=2",),
    ),
    "pipeline": Chapter(
        "What if the layers are split?",
        pipeline,
        "Starter, main course and dessert have a station each, and every table's order passes from "
        "one to the next. With one table all but one station idle; with many tables they idle only "
        "when the kitchen opens and when it closes.",
        "pipeline",
        (
            "fivefold schedule zb-v --stages 4 --microbatches 8",
            "fivefold verify tiny --layout pp=2 --schedule zb-h1",
        ),
    ),
    "context": Chapter(
        "What if one sequence is too long?",
        context,
        "One order slip is as long as a scroll and is cut into strips, one for each cook. A line "
        "may refer to any line above it, so that notes about all strips go around the table until "
        "each cook has read those that came before.",
        "context",
        ("fivefold verify tiny --layout cp=2 --context zigzag",),
    ),
    "expert": Chapter(
        "What if the model has experts?",
        expert,
        "Specialists for fish, pastry and sauces work in different kitchens. A waiter sends each "
        "ingredient to the two that suit it best and brings it back; if all want fish, the fish "
        "cook keeps everybody waiting.",
        "expert",
        ('fivefold verify tiny-moe --layout "dp=2 ep=2"',),
    ),
    "five": Chapter(
        "What if all five are used at once?",
        five,
        "A chain of restaurants: branches share the orders (data), each has stations in a row "
        "(pipeline), at a station several cooks share a pot (tensor), long slips are cut "
        "(context), and specialists serve several branches (expert).",
        "landscape",
        ('fivefold verify tiny-moe --layout "dp=2 tp=2 pp=2 cp=2 ep=2"',),
    ),
    "layer": Chapter(
        "What happens inside one layer?",
        layer,
        "Follow one plate through one station: who holds it, who is called before the next step, "
        "and how much is carried, on the way in and on the way back.",
        "layer",
        ('fivefold rehearse tiny-moe --layout "dp=2 tp=2 pp=2 cp=2 ep=2" --rank 0',),
    ),
    "choose": Chapter(
        "How do you choose?",
        choose,
        "A caterer first asks what fits into the rooms, then who has to talk to whom all evening, "
        "and puts those at the same table.",
        "compare",
        (
            "fivefold plan llama-3.1-70b --machine h100 --batch 128 "
            '--layout "dp=4 tp=4 pp=4" --zero 1 --recompute selective',
            "fivefold plan llama-3.1-70b --machine h100 --batch 128 --gpus 64",
        ),
    ),
    "serving": Chapter(
        "How does a trained model answer?",
        serving_answers,
        "Reading an order takes one look, however long it is; then the dishes leave the kitchen "
        "one by one, and for each the cook walks past all shelves. A cook who walks anyway can "
        "carry plates for thirty tables, as long as the notes of all of them fit on the board.",
        "serving",
        ("fivefold plan llama-3.1-70b --serve --machine h100 --gpus 8 --concurrency 32",),
    ),
    "trainers": Chapter(
        "What can other trainers run?",
        other_trainers,
        "Other kitchens have other ovens: one has fed thousands of tables, one fits on a cart. Ask "
        "which of your dishes they can cook, and taste one before you book.",
        "trainers",
        ('fivefold plan llama-3.1-70b --layout "tp=8 pp=4" --machine h100 --set stack=torchtitan',),
    ),
}


def chapter_of(panel: str) -> str | None:
    """The chapter that opens a panel with its defaults; None if no chapter does."""
    return next(
        (n for n, chapter in CHAPTERS.items() if chapter.panel == panel and not chapter.start), None
    )


def contents() -> list[View]:
    """The path as the page's scripts need it."""
    return [
        {
            "name": name,
            "question": chapter.question,
            "panel": chapter.panel,
            "start": dict(chapter.start),
        }
        for name, chapter in CHAPTERS.items()
    ]


def questions(
    params: Params, panel: str | None, panels: Collection[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """What an address of Learn shows: a panel, a chapter with its panel, or the whole path."""
    choices = {name: value for name, value in params.items() if name not in _PLACES}
    panel = panel or params.get("panel")
    if "chapter" in params:
        chapter = view(params["chapter"])
        if panel is None:
            yield f"chapter/{chapter['name']}", {}
        panel = panel or chapter["panel"]
        if panel == chapter["panel"]:
            choices = {**chapter["start"], **choices}
    if panel is not None and panel not in panels:
        raise UnknownName("panel", panel, panels)
    for name in panels if panel is None else [panel]:
        if panel is None:
            path = (chapter_name for chapter_name, entry in CHAPTERS.items() if entry.panel == name)
            yield from ((f"chapter/{chapter_name}", {}) for chapter_name in path)
        yield f"learn/{name}", choices


@cache
def view(name: str) -> View:
    """One chapter with its numbers, and its neighbours on the path."""
    if name not in CHAPTERS:
        raise UnknownName("chapter", name, CHAPTERS)
    names, chapter, seen = list(CHAPTERS), CHAPTERS[name], set[str]()
    index = names.index(name)
    return {
        "name": name,
        "question": chapter.question,
        "number": index + 1,
        "total": len(names),
        "paragraphs": [linked(paragraph, seen) for paragraph in chapter.prose()],
        "analogy": linked(chapter.analogy, seen),
        "commands": list(chapter.commands),
        "panel": chapter.panel,
        "start": dict(chapter.start),
        "before": names[index - 1] if index else None,
        "after": names[index + 1] if index + 1 < len(names) else None,
    }


def text(view: View) -> list[str]:
    """The same for a terminal."""
    prose = [line for paragraph in view["paragraphs"] for line in (*wrapped(plain(paragraph)), "")]
    return [
        f"Chapter {view['number']} of {view['total']}: {view['question']}",
        "",
        *prose,
        *wrapped(f"In a kitchen: {plain(view['analogy'])}"),
        "",
        "For real:",
        *(f"  {command}" for command in view["commands"]),
    ]


def plain(parts: list[View]) -> str:
    """A linked text without its links."""
    return "".join(part["text"] for part in parts)
