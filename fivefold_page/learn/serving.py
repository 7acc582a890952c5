"""Learn: how a trained model answers: the prompt, one token after another, and the KV cache.

    view(params) -> {"choices", "gpus", "limit", "shown", "prompt", "output", "prefill", "step",
                     "memory", "rows", "frames", "sentences"}

The first frames follow one answer in the first layout that fits, then more of them at a time, until
the cache is full. Each of the others speaks of one layout on the same GPUs. Times and bytes are
those of `fivefold plan --serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fivefold.core import hardware as machine
from fivefold.core.layout import Layout
from fivefold.core.model import presets as models
from fivefold.planner.serving import (
    LayoutLoad,
    ServingFit,
    ServingPlan,
    ServingRequest,
    legal_layouts,
)
from fivefold.render import duration, gib, table, wrapped
from fivefold_page import Params, View
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines, size_text

TITLE = "An answer, token after token"
MACHINE, GPUS, PROMPT, OUTPUT = "h100", 8, 2048, 256
CHOICES: Mapping[str, Choice] = {
    "model": Choice("Model", ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"), "llama-3.1-70b"),
    "answers": Choice("Answers at a time", ("1", "32", "256"), "32"),
}


@dataclass(frozen=True)
class ServingWay:
    """A layout of all GPUs, and what it means for a model that answers."""

    title: str
    says: str
    degrees: Mapping[str, int]


WAYS: Mapping[str, ServingWay] = {
    "tensor": ServingWay(
        "tensor",
        "Each GPU reads an eighth of every matrix and of the cache, and the GPUs meet twice a "
        "layer.",
        {"tp": 8},
    ),
    "pipeline": ServingWay(
        "pipeline",
        "Each GPU has an eighth of the layers. A token still passes all of them, one after "
        "another, while others follow it.",
        {"pp": 8},
    ),
    "both": ServingWay(
        "tensor and pipeline",
        "Four GPUs share each matrix, and two groups of them share the layers.",
        {"tp": 4, "pp": 2},
    ),
    "data": ServingWay(
        "replicas",
        "Every GPU has the whole model and its own answers; they never talk.",
        {"shard": 8},
    ),
    "expert": ServingWay(
        "experts",
        "Every GPU has its own answers and an eighth of the experts; tokens travel to theirs.",
        {"shard": 8, "ep": 8},
    ),
}


def view(params: Params) -> View:
    """One answer, many answers, and the layouts for them."""
    choices = chosen(CHOICES, params)
    answers, where = int(choices["answers"]), machine.load(MACHINE)
    plans = {name: _planned(choices["model"], name, answers) for name in WAYS}
    rows = [_row(name, plan) for name, plan in plans.items()]
    fitting = [candidate for candidate in plans.values() if isinstance(candidate, ServingPlan)]
    shown = fitting[0]
    load = LayoutLoad(shown.fit)
    single_plan = load.steady(1)
    return {
        "choices": choices,
        "gpus": GPUS,
        "machine": MACHINE,
        "limit": where.memory,
        "shown": str(shown.layout),
        "prompt": PROMPT,
        "output": OUTPUT,
        "prefill": single_plan.ttft,
        "step": single_plan.tpot,
        "memory": {
            "weights": shown.fit.weights,
            "engine": where.memory - shown.fit.cache - shown.fit.weights,
            "token": shown.fit.token_bytes,
            "cache": shown.fit.cache,
        },
        "rows": rows,
        "frames": [*_story(load, single_plan), *_row_frames(rows)],
        "sentences": _sentences(fitting, rows),
    }


@cache
def _planned(model: str, name: str, answers: int) -> ServingPlan | str:
    """The plan of a layout, or why there is none."""
    shape = models.load(model)
    request = ServingRequest(
        shape, machine.load(MACHINE), GPUS, PROMPT, OUTPUT, concurrency=answers
    )
    degrees = WAYS[name].degrees
    if "ep" in degrees and shape.moe is None:
        return "the model has no experts"
    axes = ("tp", "pp", "shard", "ep")
    for layout in legal_layouts(request):
        if all(getattr(layout, axis) == degrees.get(axis, 1) for axis in axes):
            return _loaded(request, layout)
    return "the model cannot be cut so"


def _loaded(request: ServingRequest, layout: Layout) -> ServingPlan | str:
    fit, answers = ServingFit(request, layout), request.concurrency or 1
    if fit.replica_room >= 1:
        estimate = LayoutLoad(fit).expected()
        busy = min(1.0, answers / layout.dp)  # of the replicas
        return replace(estimate, tokens_per_s=busy * estimate.tokens_per_s)
    return f"{gib(fit.weights)} of weights on each GPU leave no room for a cache"


def _row(name: str, outcome: ServingPlan | str) -> View:
    mode = WAYS[name]
    row: View = {"name": name, "title": mode.title, "says": mode.says}
    if isinstance(outcome, str):
        return row | {"problem": outcome}
    return row | {
        "problem": "",
        "layout": str(outcome.layout),
        "ttft": outcome.ttft,
        "tpot": outcome.tpot,
        "tokens_per_s": outcome.tokens_per_s,
        "room": outcome.max_sequences,
        "weights": outcome.fit.weights,
        "ttft_text": duration(outcome.ttft),
        "tpot_text": duration(outcome.tpot),
    }


def _story(load: LayoutLoad, single_plan: ServingPlan) -> list[View]:
    """One answer, then more of them, until the cache is full."""
    fit, capacity = load.fit, load.fit.replica_room
    token, cache_tokens = fit.token_bytes, fit.request.cached_tokens
    batch = min(32, capacity)
    longer = sum(load.steady(batch).parts.values()) / sum(single_plan.parts.values())
    says = [
        f"Prefill. All {PROMPT:,} tokens of the prompt pass through the model together, in "
        f"{duration(single_plan.ttft)}: large matmuls, as in training. Of every token a key and a "
        f"value stay in each layer: {size_text(token)} on a GPU. Now the cache has "
        f"{size_text(token * PROMPT)} of this sequence.",
        f"Decode. The first token is drawn from the prompt's last one. The next forward has one "
        f"token alone, and reads all weights and the cache for it: {duration(single_plan.tpot)}. "
        "Reading takes nearly all of this time, and arithmetic almost none.",
        f"And so on, token after token: {OUTPUT} of them take {duration(single_plan.latency)} with "
        f"the prompt. Each adds {size_text(token)} to the cache.",
        f"With {batch} answers at a time a step reads the weights once for all of them, and takes "
        f"{longer:.1f} times as long as for one. So many answers cost little more than one, "
        "as long as their caches fit.",
        f"With {capacity:,} answers the cache is full: {size_text(token * cache_tokens)} for each "
        "on a GPU. Whoever comes now waits until an answer ends. More GPUs, or fewer bytes for a "
        "number, make room.",
    ]
    places = (
        (PROMPT, 1),
        (PROMPT + 1, 1),
        (cache_tokens, 1),
        (cache_tokens, batch),
        (cache_tokens, capacity),
    )
    ends = (
        single_plan.ttft,
        single_plan.ttft + single_plan.tpot,
        single_plan.latency,
        single_plan.latency,
        single_plan.latency,
    )
    return [
        {"says": sentence, "tokens": tokens, "sequences": count, "until": until, "row": None}
        for sentence, (tokens, count), until in zip(says, places, ends, strict=True)
    ]


def _row_frames(rows: list[View]) -> list[View]:
    return [
        {"says": _words(row), "tokens": 0, "sequences": 0, "until": 0.0, "row": row_index}
        for row_index, row in enumerate(rows)
    ]


def _words(row: View) -> str:
    head = f"{row['title'][0].upper()}{row['title'][1:]}. {row['says']}"
    if row["problem"]:
        return f"{head} Not here: {row['problem']}."
    return (
        f"{head} First token after {row['ttft_text']}, each other after {row['tpot_text']}; "
        f"{row['tokens_per_s']:,.0f} tokens/s in all, and room for {row['room']:,} answers."
    )


def _sentences(plans: list[ServingPlan], rows: list[View]) -> list[str]:
    titles = {row["layout"]: row["title"] for row in rows if not row["problem"]}
    fast = min(plans, key=lambda candidate: candidate.tpot)
    most = max(plans, key=lambda candidate: candidate.tokens_per_s)
    wide = max(plans, key=lambda candidate: candidate.max_sequences)

    def named(plan: ServingPlan) -> str:
        return f"{titles[str(plan.layout)]} ({plan.layout})"

    return [
        f"The fastest tokens under this load: {named(fast)}, one every {duration(fast.tpot)}. The "
        f"most of them: {named(most)}, {most.tokens_per_s:,.0f} tokens/s. Room for the most "
        f"answers: {named(wide)}, {wide.max_sequences:,}.",
        "tp shortens every step, since more GPUs read at once, and pays with collectives that "
        "have to wait for one another: inside a node. pp shortens no token, but needs little "
        "traffic and leaves room for the cache: across nodes. ep spreads experts, of which each "
        "token reads few: with many answers every expert has work. Replicas are for what already "
        "fits.",
        "A long prompt holds up the tokens of all answers in its step. So engines cut prompts into "
        "chunks, or give prefill and decode GPUs of their own, as fivefold serve can.",
    ]


def text(view: View) -> list[str]:
    """The same for a terminal."""
    choices = view["choices"]
    head = ("layout", "first token", "each token", "tokens/s", "room")
    rows = [
        (row["title"], "-", "-", "-", "-")
        if row["problem"]
        else (
            row["title"],
            row["ttft_text"],
            row["tpot_text"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['room']:,}",
        )
        for row in view["rows"]
    ]
    story = (frame["says"] for frame in view["frames"] if frame["row"] is None)
    story_lines = [line for sentence in story for line in wrapped(sentence)]
    none = (f"No {row['title']} here: {row['problem']}." for row in view["rows"] if row["problem"])
    return [
        f"{choices['model']} on {view['gpus']} GPUs of {view['machine']}, {view['prompt']:,} "
        f"tokens of a prompt, {view['output']} of an answer, {choices['answers']} at a time",
        "",
        *story_lines,
        "",
        *table([head, *rows]),
        "",
        *(line for sentence in none for line in wrapped(sentence)),
        *sentence_lines(view),
    ]
