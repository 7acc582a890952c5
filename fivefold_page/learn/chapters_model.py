"""Prose of the chapters that split the model: matrices, tokens, layers, sequences and experts.

Each function returns the paragraphs of a chapter; all numbers come from the code that plans.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.core.model import load, parameters
from fivefold.cost.traffic import message_bytes
from fivefold.render import duration, gib, percent
from fivefold_page.learn import context as context_panel
from fivefold_page.learn import expert as expert_panel
from fivefold_page.learn import pipeline as pipeline_panel
from fivefold_page.learn.chapters_states import LARGE, MIDDLE, gpu, sent_bytes, states_bytes
from fivefold_page.learn.device import ALONE
from fivefold_page.learn.lesson import size_text

_EXPERTS = "mixtral-8x7b"
_ITEMSIZE = 2  # bytes of a bf16 number
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
