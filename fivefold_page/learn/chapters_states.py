"""Prose of the first chapters: what training keeps, how ranks talk, and splitting the data axis.

Each function returns the paragraphs of a chapter; all numbers come from the code that plans.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.core import Machine
from fivefold.core import hardware as machine
from fivefold.core.model import parameters, training_flops
from fivefold.cost.traffic import Collective, predict_traffic
from fivefold.planner import Estimate
from fivefold.render import duration, gib, percent
from fivefold_page.explore import State
from fivefold_page.learn.device import ALONE

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
