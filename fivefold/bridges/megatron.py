"""Megatron-LM core 0.20: the arguments of `pretrain_gpt.py`, in a script that torchrun starts.

Keys as of August 2026 (commit d98e8a6). Data parallelism is what the other degrees leave of the
ranks. The stages of a pipeline are written as `--pipeline-model-parallel-layout`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from typing import Any, NamedTuple

from fivefold.bridges.formats import NOTE, options_of_words, shell_words
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Spelling, Table, typed
from fivefold.bridges.target import FoundModel, Impossible, Sheet, Target, with_batch
from fivefold.core import MOST_LAYERS, BadFile, FivefoldError
from fivefold.core.model import GATED_DELTA, Hybrid, Mla, Moe, Recompute, Rope, Shape
from fivefold.core.model import presets as models

# Megatron's text of a pipeline, `Et*3|(tt|)*29,m|L`, to layers per stage and back.
#
# Letters: E embedding, t decoder layer, m multi-token-prediction layer, L loss. A bar ends a stage,
# a star repeats the letter or the brackets before it, commas have no meaning. The stages are in the
# order of the model: with v virtual stages a rank, rank i has stages i, i + p, … .

_WORD = re.compile(r"([EtmL|()])|\*(\d{1,9})")


class PipelineText(NamedTuple):
    """What a text says: decoder layers of each stage, and MTP layers of the model."""

    layers: tuple[int, ...]
    mtp: int


def layout_text(layers: Sequence[int], mtp: int = 0) -> str:
    """The text of these stages.

    >>> layout_text((3, 2, 2, 2, 1), mtp=1)
    'Et*3|(t*2|)*3t*1mL'
    """
    last = len(layers) - 1
    tokens = [f"t*{count}" for count in layers]
    tokens[0] = f"E{tokens[0]}"
    tokens[last] += "m" * mtp + "L"
    runs = [(word, len([*same])) for word, same in groupby(tokens[:-1])]
    ended = [f"{word}|" if times == 1 else f"({word}|)*{times}" for word, times in runs]
    return "".join([*ended, tokens[last]])


def parse_layout(text: str) -> PipelineText:
    """Read such a text; every mistake is refused with its rule.

    >>> parse_layout("Et*3|(tt|)*2,m|L").layers
    (3, 2, 2, 0, 0)
    """
    stages = _expanded(_words(text), text).split("|")
    letters = "".join(stages)
    problems = [
        f"{letter} must be there once, at the {position}: put it there"
        for letter, position, in_position in (
            ("E", "beginning", letters.startswith("E")),
            ("L", "end", letters.endswith("L")),
        )
        if letters.count(letter) != 1 or not in_position
    ]
    if "m" in letters and "t" in letters[letters.index("m") :]:
        problems.append("a decoder layer (t) after an MTP layer (m): put MTP layers last")
    if problems:
        raise BadFile(f"pipeline layout {text[:60]!r}", problems)
    return PipelineText(tuple(stage.count("t") for stage in stages), letters.count("m"))


def filled_stages(layers: Sequence[int]) -> tuple[int, ...]:
    """The nearest stages that all have a layer: empty ones get one of an earlier stage.

    >>> filled_stages((3, 2, 2, 0, 0))
    (3, 1, 1, 1, 1)
    """
    counts = list(layers)
    for i, count in enumerate(counts):
        if count:
            continue
        near = sorted(range(len(counts)), key=lambda other: (abs(other - i), other))
        rich = next((other for other in near if counts[other] > 1), None)
        if rich is None:
            rule = f"{sum(layers)} layers for {len(layers)} stages: every stage needs one"
            raise BadFile("the pipeline layout", [rule])
        counts[rich] -= 1
        counts[i] = 1
    return tuple(counts)


def _words(text: str) -> list[str]:
    plain = re.sub(r"[,\s]", "", text)
    tokens: list[str] = []
    at = 0
    while at < len(plain):
        match = _WORD.match(plain, at)
        if match is None or len(tokens) > 4 * MOST_LAYERS:
            rule = f"{plain[at]!r} at {at} is no part of a layout: use E, t, m, L, |, * and ( )"
            raise BadFile(f"pipeline layout {text[:60]!r}", [rule])
        tokens.append(match[1] or match[2])
        at = match.end()
    return tokens


def _expanded(tokens: list[str], text: str) -> str:
    """The letters with all repeats written out, within a limit."""
    open_groups = [""]
    last = ""  # what a star repeats
    problem = ""
    for word in tokens:
        if word == "(":
            open_groups.append("")
            last = ""
        elif word == ")":
            if len(open_groups) == 1:
                problem = "a bracket closes that none opened: take it out"
                break
            last = open_groups.pop()
            open_groups[-1] += last
        elif word.isdecimal():
            if not last or not 1 <= int(word) <= MOST_LAYERS:
                problem = f"*{word}: write it after a letter or brackets, from 1 to {MOST_LAYERS:,}"
                break
            if len(last) * int(word) + len(open_groups[-1]) > 4 * MOST_LAYERS:
                problem = f"more than {MOST_LAYERS:,} layers: write fewer"
                break
            open_groups[-1] += last * (int(word) - 1)
            last = ""
        else:
            open_groups[-1] += word
            last = word
    if not problem and len(open_groups) > 1:
        problem = "a bracket is open at the end: close it"
    if problem:
        raise BadFile(f"pipeline layout {text[:60]!r}", [problem])
    return open_groups[0]


# The arguments that describe a model to Megatron-LM, as a shape and back.
#
# A few things of a shape are fixed by the kind of model that `pretrain_gpt.py` trains; where a
# shape has something else, the arguments do not describe it, and its name in our comment does.

_USUAL_VOCABULARY = 128_000  # for a file that leaves it to a tokenizer
# Arguments, our keys and their types.
_SIZES: tuple[tuple[str, str, type], ...] = (
    ("num-layers", "layers", int),
    ("hidden-size", "width", int),
    ("ffn-hidden-size", "ffn", int),
    ("num-attention-heads", "heads", int),
    ("num-query-groups", "kv_heads", int),
    ("kv-channels", "head_dim", int),
    ("vocab-size", "vocab", int),
    ("max-position-embeddings", "max_seq", int),
    ("norm-epsilon", "norm_eps", float),
    ("rotary-base", "rope_theta", float),
    ("mtp-num-layers", "mtp", int),
)
_EXPERTS: tuple[tuple[str, str, type], ...] = (
    ("num-experts", "experts", int),
    ("moe-router-topk", "top_k", int),
    ("moe-ffn-hidden-size", "ffn", int),
    ("moe-shared-expert-intermediate-size", "shared_ffn", int),
)
_LATENTS: tuple[tuple[str, str, type], ...] = (
    ("q-lora-rank", "q_rank", int),
    ("kv-lora-rank", "kv_rank", int),
    ("qk-head-dim", "nope_dim", int),
    ("qk-pos-emb-head-dim", "rope_dim", int),
    ("v-head-dim", "value_dim", int),
)
_RECURRENCE: tuple[tuple[str, str, type], ...] = (
    ("linear-attention-freq", "attention_every", int),
    ("linear-num-value-heads", "heads", int),
    ("linear-num-key-heads", "key_heads", int),
    ("linear-value-head-dim", "head_dim", int),
    ("linear-key-head-dim", "key_dim", int),
    ("linear-conv-kernel-dim", "kernel", int),
)
_VARIANT = "experimental-attention-variant"
_GATED_DELTA_NET = ("gdn", "gated_delta_net")  # as it is called now, and before
# What --use-rope-scaling stands for, with the factor that it has if no other is given.
_SCALED = Rope("llama3", 8.0, 8192)
_ACTIVATIONS = {"swiglu": "swiglu", "squared-relu": "relu"}
_POSITIONS = {"rope": "rotary", "learned_absolute": "learned", "none": "none", "yarn": "rotary"}
_SWITCHES = (
    *("group-query-attention", "swiglu", "squared-relu", "qk-layernorm", "add-qkv-bias"),
    *("disable-bias-linear", "untie-embeddings-and-output-weights", "multi-latent-attention"),
    *("apply-layernorm-1p", "attention-output-gate", "moe-shared-expert-gate"),
)
_OTHERS = (
    *("normalization", "position-embedding-type", "moe-layer-freq", "moe-router-score-function"),
    *(
        "padded-vocab-size",
        "use-rope-scaling",
        "rope-scaling-factor",
        "rotary-percent",
        "rope-type",
    ),
    *("use-rotary-position-embeddings", "mtp-loss-scaling-factor", "rotary-scaling-factor"),
    *("moe-router-num-groups", "moe-router-group-topk", "moe-router-topk-scaling-factor"),
    *("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-router-pre-softmax"),
    *("moe-router-enable-expert-bias", "make-vocab-size-divisible-by", "moe-router-dtype"),
    *("moe-router-bias-update-rate", "mscale", "mscale-all-dim", _VARIANT),
)
_NUMBERS = (*_SIZES, *_EXPERTS, *_LATENTS, *_RECURRENCE)
KNOWN = frozenset([*(row[0] for row in _NUMBERS), *_SWITCHES, *_OTHERS])


def model_arguments(shape: Shape) -> Flat:
    """What the arguments can say of a model."""
    flat: Flat = {theirs: getattr(shape, ours) for theirs, ours, _ in _SIZES}
    flat |= {"mtp-num-layers": shape.mtp or None, "rotary-base": int(shape.rope_theta)}
    flat |= {"group-query-attention": shape.kv_heads != shape.heads}
    flat |= {"normalization": "LayerNorm" if shape.norm == "layer" else "RMSNorm"}
    types = {"rotary": "rope", "learned": "learned_absolute"}
    flat["position-embedding-type"] = types.get(shape.positions, "none")
    flat |= {name: True for name, ours in _ACTIVATIONS.items() if shape.activation == ours}
    flat["qk-layernorm"] = shape.qk_norm != "none"
    flat["add-qkv-bias"] = shape.qkv_bias and not shape.mlp_bias
    flat["disable-bias-linear"] = not shape.mlp_bias
    flat["untie-embeddings-and-output-weights"] = not shape.tied
    flat["apply-layernorm-1p"] = shape.norm == "rms_offset"
    flat["attention-output-gate"] = shape.attention_gate
    if shape.rope is not None and replace(shape.rope, factor=_SCALED.factor) == _SCALED:
        flat |= {"use-rope-scaling": True, "rope-scaling-factor": shape.rope.factor}
    if shape.rotary_dim is not None:
        flat["rotary-percent"] = shape.rotary_dim / shape.head_dim
    if shape.hybrid is not None and shape.hybrid.mixer == GATED_DELTA:
        flat[_VARIANT] = _GATED_DELTA_NET[0]
        flat |= {theirs: getattr(shape.hybrid, ours) for theirs, ours, _ in _RECURRENCE}
    if shape.moe is not None:
        flat |= _expert_arguments(shape.moe, shape.layers)
    if shape.mla is not None:
        flat |= {"multi-latent-attention": True, "num-query-groups": None, "kv-channels": None}
        flat |= {theirs: getattr(shape.mla, ours) for theirs, ours, _ in _LATENTS}
        flat["group-query-attention"] = False
    return {name: value for name, value in flat.items() if value not in (None, False)}


def _expert_arguments(moe: Moe, layers: int) -> Flat:
    flat: Flat = {theirs: getattr(moe, ours) or None for theirs, ours, _ in _EXPERTS}
    flat["moe-router-score-function"] = moe.score
    flat["moe-shared-expert-gate"] = moe.shared_gated
    if moe.first_dense:
        flat["moe-layer-freq"] = f"([0]*{moe.first_dense}+[1]*{layers - moe.first_dense})"
    elif moe.every > 1:
        flat["moe-layer-freq"] = f"([0]*{moe.every - 1}+[1]*1)*{layers // moe.every}"
    return flat


def find_model(flat: Flat) -> FoundModel:
    """The shape that the arguments describe, as a text; None without layers, width and heads."""
    if any(flat.get(name) is None for name in ("num-layers", "hidden-size", "num-attention-heads")):
        return FoundModel(None, KNOWN)
    notes: list[str] = []
    shape = _shape(flat, notes)
    return FoundModel(models.to_text(shape), KNOWN, tuple(notes))


def _typed_values(flat: Flat, keys: tuple[tuple[str, str, type], ...]) -> dict[str, Any]:
    rows = [row for row in keys if flat.get(row[0]) is not None]
    return {ours: typed(flat[theirs], kind, theirs) for theirs, ours, kind in rows}


def _shape(flat: Flat, notes: list[str]) -> Shape:
    fields = _typed_values(flat, _SIZES)
    gated = bool(flat.get("swiglu"))
    fields.setdefault("ffn", (8 * fields["width"] // 3 if gated else 4 * fields["width"]))
    if not flat.get("group-query-attention") or "kv_heads" not in fields:
        fields["kv_heads"] = fields["heads"]
    fields.setdefault("head_dim", fields["width"] // max(1, fields["heads"]))
    if "padded-vocab-size" in flat:
        fields["vocab"] = typed(flat["padded-vocab-size"], int, "padded-vocab-size")
    if "vocab" not in fields:
        fields["vocab"] = _USUAL_VOCABULARY
        assumed = f"planned with {_USUAL_VOCABULARY:,}; say --set vocab=N"
        notes.append(f"the vocabulary is its tokenizer's: {assumed}")
    fields.setdefault("max_seq", typed(flat.get("seq-length", 4096), int, "seq-length"))
    biased = not flat.get("disable-bias-linear")
    fields |= {"mlp_bias": biased, "out_bias": biased}
    fields["qkv_bias"] = biased or bool(flat.get("add-qkv-bias"))
    rms = "rms_offset" if flat.get("apply-layernorm-1p") else "rms"
    fields["norm"] = rms if flat.get("normalization") == "RMSNorm" else "layer"
    fields["norm_bias"] = fields["norm"] == "layer"
    chosen = [ours for theirs, ours in _ACTIVATIONS.items() if flat.get(theirs)]
    fields["activation"] = chosen[0] if chosen else "gelu"
    old = "rope" if flat.get("use-rotary-position-embeddings") else "learned_absolute"
    kind = str(flat.get("position-embedding-type", old))
    if kind not in _POSITIONS:
        raise FivefoldError(
            f"position-embedding-type = {kind}: known here are {', '.join(_POSITIONS)}"
        )
    fields["positions"] = _POSITIONS[kind]
    fields["qk_norm"] = "head" if flat.get("qk-layernorm") else "none"
    fields["tied"] = not flat.get("untie-embeddings-and-output-weights")
    if flat.get("multi-latent-attention"):
        mla = Mla(
            **{"kv_rank": 32, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
            | _typed_values(flat, _LATENTS)
        )
        fields |= {"mla": mla, "head_dim": mla.nope_dim + mla.rope_dim, "qk_norm": "none"}
        fields["kv_heads"] = fields["heads"]
    if flat.get("num-experts") is not None:
        fields["moe"] = _moe(flat, fields["ffn"])
    fields |= _other_attention(flat, fields["head_dim"])
    return Shape(name="megatron", **fields)


def _other_attention(flat: Flat, head_dim: int) -> dict[str, Any]:
    """Scaled positions, heads of which a part is rotated, gates, and linear attention in some
    layers."""
    fields: dict[str, Any] = {"attention_gate": bool(flat.get("attention-output-gate"))}
    if flat.get("use-rope-scaling"):
        factor = flat.get("rope-scaling-factor", _SCALED.factor)
        fields["rope"] = replace(_SCALED, factor=typed(factor, float, "rope-scaling-factor"))
    rotated = int(head_dim * typed(flat.get("rotary-percent", 1.0), float, "rotary-percent"))
    if rotated < head_dim:
        fields["rotary_dim"] = rotated
    variant = str(flat.get(_VARIANT, ""))
    if variant not in ("", *_GATED_DELTA_NET):
        raise FivefoldError(f"{_VARIANT} = {variant}: known here is {_GATED_DELTA_NET[0]}")
    if variant:
        sizes: dict[str, Any] = {"attention_every": 4, "kernel": 4, "heads": 32, "key_heads": 16}
        sizes |= {"head_dim": 128, "key_dim": 128}
        fields["hybrid"] = Hybrid(**(sizes | _typed_values(flat, _RECURRENCE)))
    return fields


def _moe(flat: Flat, ffn: int) -> Moe:
    numbers: dict[str, Any] = {"top_k": 2, "ffn": ffn, **_typed_values(flat, _EXPERTS)}
    numbers["shared"] = 1 if numbers.get("shared_ffn") else 0
    numbers["shared_gated"] = bool(flat.get("moe-shared-expert-gate"))
    score = str(flat.get("moe-router-score-function", "softmax"))
    text = str(flat.get("moe-layer-freq", "1")).replace(" ", "")
    if match := re.fullmatch(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?(?:\*(\d{1,4}))?", text):
        every = int(match[3] or 1) > 1
        numbers |= {"every": int(match[1]) + 1} if every else {"first_dense": int(match[1])}
    elif text.isdecimal() and int(text) > 1:
        numbers["every"] = int(text)
    sigmoid = score == "sigmoid"
    return Moe(**numbers, score="sigmoid" if sigmoid else "softmax", renormalise=sigmoid)


_SEGMENTS = 64  # the most blocks of a segment of full recomputation
_MODULES = {"norm": "layernorm", "act": "moe_act", "mlp": "mlp", "experts": "moe"}
_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
CURVES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
CONTEXTS = {"zigzag": "p2p", "allgather": "allgather", "ulysses": "a2a"}


def _as_it_is(text: Any) -> Any:
    return text


def _stages_of(text: Any) -> str:
    return ",".join(map(str, filled_stages(parse_layout(str(text)).layers)))


STAGES = Spelling(_as_it_is, _stages_of)


def recompute_entries(prefix: str, dash: str) -> tuple[dict[str, Any], frozenset[str]]:
    """All rules that Megatron has, and those that only experts have."""

    def named(**keys: Any) -> dict[str, Any]:
        return {f"{prefix}recompute_{key}".replace("_", dash): value for key, value in keys.items()}

    entries: dict[str, Any] = {"none": {}}
    moe: set[str] = set()
    for size in range(1, 1 + len(_MODULES)):
        for chosen in combinations(_MODULES, size):
            rule = str(Recompute.parse("+".join(chosen)))
            modules = " ".join(_MODULES[module] for module in chosen)
            entries[rule] = named(granularity="selective", modules=modules)
            if {"act", "experts"} & {*chosen}:
                moe.add(rule)
    for blocks in range(1, 1 + _SEGMENTS):
        rule = str(Recompute(blocks=blocks))
        entries[rule] = named(granularity="full", method="uniform", num_layers=blocks)
    return entries, frozenset(moe)


def _numbers() -> dict[str, Any]:
    entries: dict[str, Any] = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {}}
    for scaling in ("tensorwise", "blockwise", "mxfp8"):
        for gradients, name in (("e5m2", "hybrid"), ("e4m3", "e4m3")):
            keys = {"bf16": True, "fp8-format": name, "fp8-recipe": scaling}
            entries[f"fp8 {scaling} {gradients}"] = keys
    return entries


_FSDP = {"use-megatron-fsdp": True}
TABLE: Table = (
    Key("tensor-model-parallel-size", "tp", usual=1),
    Key("pipeline-model-parallel-size", "pp", usual=1),
    Key("context-parallel-size", "cp", usual=1),
    Key("expert-model-parallel-size", "ep", usual=1),
    Key("expert-tensor-parallel-size", "etp"),
    Key("num-distributed-optimizer-instances", "replicate", usual=1),
    Key("sequence-parallel", "sp", bool, usual=False),
    Key("cp-comm-type", "context", str, CONTEXTS, usual="zigzag"),
    Key(
        *("use-tp-pp-dp-mapping", "order", bool),
        {"tp-cp-dp-pp": False, "tp-cp-pp-dp": True},
        usual="tp-cp-dp-pp",
    ),
    Key("pipeline-model-parallel-layout", "layout_text", str, spelling=STAGES),
    Key("num-virtual-stages-per-pipeline-rank", "virtual"),
    KeyChoice(
        ("zero", "gather"),
        {
            (0, None): {},
            (1, None): {"use-distributed-optimizer": True},
            (2, None): {**_FSDP, "data-parallel-sharding-strategy": "optim_grads"},
            (3, "microbatch"): {**_FSDP, "data-parallel-sharding-strategy": "optim_grads_params"},
        },
    ),
    KeyChoice(("recompute",), *recompute_entries("", "-")),
    KeyChoice(("number",), _numbers()),
    Key("grad-reduce-in-bf16", "grad_dtype", bool, {"fp32": False, "bf16": True}, usual="fp32"),
    KeyChoice(("offload",), {"none": {}, "cpu": {"optimizer-cpu-offload": True}}),
    Key("micro-batch-size", "microbatch_size"),
    Key("global-batch-size", "batch"),
    Key("seq-length", "seq"),
    Key("train-iters", "steps"),
    Key("optimizer", "optimizer", str, _OPTIMIZERS, usual="adamw"),
    Key("lr", "lr", float),
    Key("lr-decay-style", "lr_curve", str, CURVES, usual="linear"),
    Key("lr-warmup-iters", "warmup"),
    Key("weight-decay", "weight_decay", float),
    Key("clip-grad", "clip", float),
    Key("seed", "seed"),
)
FLAGS = frozenset(
    [
        *("sequence-parallel", "use-tp-pp-dp-mapping", "use-distributed-optimizer", "bf16", "fp16"),
        *("use-megatron-fsdp", "grad-reduce-in-bf16", "optimizer-cpu-offload", "swiglu"),
        *("overlap-grad-reduce", "overlap-param-gather", "group-query-attention", "qk-layernorm"),
        *("untie-embeddings-and-output-weights", "disable-bias-linear", "add-qkv-bias"),
        *(
            "multi-latent-attention",
            "use-mcore-models",
            "use-flash-attn",
            "no-masked-softmax-fusion",
        ),
        *("moe-grouped-gemm", "moe-permute-fusion", "use-rope-scaling", "delay-wgrad-compute"),
        *("overlap-moe-expert-parallel-comm", "accumulate-allreduce-grads-in-fp32", "mock-data"),
        *("use-rotary-position-embeddings", "recompute-activations", "moe-router-pre-softmax"),
        "use-precision-aware-optimizer",
    ]
)
LISTS = frozenset({"recompute-modules", "cp-comm-type", "data-path"})
NEUTRAL = (
    *("nproc-per-node", "nnodes", "node-rank", "master-", "rdzv-", "data-", "tokenizer-", "save"),
    *("load", "log-", "eval-", "tensorboard-", "wandb-", "distributed-", "split", "mock-data"),
    *("overlap-grad-reduce", "overlap-param-gather", "use-mcore-models", "transformer-impl"),
    *("ckpt-format", "min-lr", "exit-", "init-method-std", "adam-", "num-workers", "vocab-file"),
    *("merge-file", "timing-", "lr-wsd-", "moe-grouped-gemm", "moe-token-dispatcher-type", "no-"),
    *("use-flash-attn", "attention-backend", "accumulate-allreduce-grads-in-fp32", "async-"),
    *("job-name", "nodes", "ntasks", "gpus", "gres", "time", "partition", "account", "output"),
    *("error", "exclusive", "mem", "cpus-per-task", "container-", "attention-dropout"),
    *("hidden-dropout", "moe-permute-fusion", "max-restarts", "tee", "local-ranks-filter"),
    "use-precision-aware-optimizer",
)


def outgoing(values: Values, shape: Shape) -> Values:
    """With the global batch and the text of the pipeline."""
    flat = with_batch(values, shape)
    text = values["stage_layers"]
    layers = None if text is None else [int(count) for count in text.split(",")]
    flat["layout_text"] = None if layers is None else layout_text(layers, shape.mtp)
    flat["virtual"] = None
    if shape.moe is None:
        flat["etp"] = None  # where it is left out it is tp
    return flat


def incoming(values: Values, flat: Flat) -> Values:
    """Chunks from the stages, or from the number of virtual stages."""
    pp, stages = values.get("pp") or 1, values.pop("layout_text", None)
    virtual = values.pop("virtual", None)
    if stages is not None:
        count = stages.count(",") + 1
        if count % pp:
            rule = f"{count} stages of the pipeline layout are no multiple of pp {pp}"
            raise FivefoldError(f"{rule}: write as many for each rank")
        if virtual not in (None, count // pp):
            rule = f"{virtual} virtual stages and {count} stages of the layout on {pp} ranks"
            raise FivefoldError(f"{rule} contradict: leave one out")
        virtual = count // pp
    virtual = virtual or 1
    values |= {"stage_layers": stages, "chunks": virtual if pp > 1 else None}
    values["schedule"] = "interleaved" if virtual > 1 and pp > 1 else "1f1b"
    if values.get("etp") is None:
        values["etp"] = values.get("tp") or 1 if _has_experts(flat) else 1
    return values


def _has_experts(flat: Flat) -> bool:
    return any(flat.get(name) is not None for name in ("num-experts", "expert-model-parallel-size"))


def impossible(values: Values, _shape: Shape) -> Iterator[Impossible]:
    """What the arguments refuse together."""
    if values["offload"] == "cpu" and values["optimizer"] != "adamw":
        yield "offload", "cpu", [{"offload": "none"}]
    if values["optimizer"] == "muon" and values["zero"] > 1:
        yield "zero", values["zero"], [{"zero": 1, "gather": None}]
    elif values["zero"] > 1 and values["order"] != "tp-cp-dp-pp":  # Megatron-FSDP
        yield "order", values["order"], [{"order": "tp-cp-dp-pp"}, {"zero": 1, "gather": None}]


def extra_keys(_shape: Shape, values: Values) -> Flat:
    """What a run has that overlaps its collectives."""
    flat: Flat = {"overlap-grad-reduce": True}
    if values["zero"]:
        flat["overlap-param-gather"] = True
    if values["zero"] > 1:
        flat["ckpt-format"] = "fsdp_dtensor"
    if values["offload"] == "cpu":
        flat["use-precision-aware-optimizer"] = True
    if values["lr_curve"] == "cosine":
        flat["min-lr"] = values["lr"] / 10
    if values["lr_curve"] == "wsd":
        flat |= {
            "lr-wsd-decay-style": "linear",
            "lr-wsd-decay-iters": max(1, values["steps"] // 5),
        }
    if _shape.moe is not None:
        flat |= {"moe-grouped-gemm": True, "moe-token-dispatcher-type": "alltoall"}
    return flat


def words_of(flat: Flat) -> list[str]:
    """Keys as options of a command line."""
    args: list[str] = []
    for name, value in flat.items():
        if value is False:
            continue
        values = [] if value is True else str(value).split(" ") if name in LISTS else [str(value)]
        args.append(" ".join([f"--{name}", *(shlex.quote(argument) for argument in values)]))
    return args


def write_script(sheet: Sheet) -> str:
    """The command, one option a line."""
    lines = ["#!/bin/bash", *(f"# {line}" for line in sheet.header)]
    if sheet.values["tp"] * sheet.values["cp"] > 1 and sheet.values["zero"] < 2:
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")  # asked for below Blackwell
    start = f"torchrun --nproc-per-node {min(sheet.world, sheet.gpus_per_node)}"
    if sheet.nodes > 1:
        start += f" --nnodes {sheet.nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    args = [start, "pretrain_gpt.py", *words_of(sheet.flat)]
    return "\n".join([*lines, " \\\n    ".join(args)]) + "\n"


def read_script(text: str) -> Flat:
    """The options of a script, its Slurm directives below `slurm`."""
    args, slurm = shell_words(text)
    flat = options_of_words(args, FLAGS, LISTS)
    if flat.get("use-megatron-fsdp"):
        flat.setdefault("data-parallel-sharding-strategy", "optim_grads_params")
        flat.pop("use-distributed-optimizer", None)
    if "fp8-format" in flat and flat.get("fp8-recipe", "delayed") == "delayed":
        flat["fp8-recipe"] = "tensorwise"
        flat[f"{NOTE}fp8"] = "fp8 with delayed scaling is planned as tensorwise"
    _settle_modules(flat)
    return {**flat, **{f"slurm.{name.lstrip('-')}": value for name, value in slurm.items()}}


def _settle_modules(flat: Flat) -> None:
    """Modules in our order; those that are not here are named."""
    if flat.pop("recompute-activations", None):
        flat["recompute-granularity"] = "selective"
    if flat.get("recompute-granularity") != "selective":
        return
    names = str(flat.pop("recompute-modules", "core_attn")).split()
    known = [module for module in _MODULES.values() if module in names]
    if other := [name for name in names if name not in known]:
        rule = "kernels of attention save no scores" if other == ["core_attn"] else "not known here"
        flat[f"{NOTE}modules"] = f"recompute-modules {' '.join(other)}: {rule}"
    flat["recompute-modules"] = " ".join(known) or None
    if not known:
        del flat["recompute-granularity"]


def world_of_launch(flat: Flat) -> int | None:
    """Ranks by torchrun's options, or by Slurm's."""

    def number(*names: str) -> int | None:
        for name in names:
            match = re.search(r"(\d{1,6})\s*$", str(flat.get(name, "")))
            if match:
                return int(match[1])
        return None

    local = number("nproc-per-node", "slurm.ntasks-per-node", "slurm.gpus-per-node", "slurm.gres")
    nodes = number("nnodes", "slurm.nodes")
    if local == 1 and (gpus := number("slurm.gpus-per-node", "slurm.gres")):
        local = gpus  # one launcher a node
    if local is None:
        return number("slurm.ntasks", "slurm.gpus")
    return local * (nodes or 1)


MEGATRON = Target(
    name="megatron",
    title="Megatron-LM",
    suffix=".sh",
    table=TABLE,
    axes=frozenset({"replicate", "shard", "tp", "pp", "cp", "ep", "etp"}),
    schedules=("1f1b", "interleaved"),
    write=write_script,
    covers=("microbatches", "chunks", "stage_layers"),
    impossible=impossible,
    outgoing=outgoing,
    incoming=incoming,
    extra_keys=extra_keys,
    model_keys=model_arguments,
    find_model=find_model,
    neutral=NEUTRAL,
    yours=("--data-path", "--tokenizer-model", "--save-interval", "--lr", "--train-iters"),
)
