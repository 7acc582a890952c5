"""Options that several verbs share, and those of `plan`: their types, help and completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.completion import starting_with
from fivefold.core import PRECISIONS
from fivefold.core import hardware as machines
from fivefold.core.layout import CONTEXT_KINDS
from fivefold.core.model import presets as models
from fivefold.core.schedule import catalog

TARGET = Annotated[
    str,
    typer.Argument(
        help="Model preset, Hugging Face config.json, plan.toml, or another framework's file.",
        metavar="MODEL",
        autocompletion=starting_with(models.presets),
    ),
]


_VALUES = {  # that Tab completes
    "machine": machines.presets,
    "schedule": catalog.names,
    "context": lambda: CONTEXT_KINDS,
    "zero": lambda: ("0", "1", "2", "3"),
    "recompute": lambda: ("none", "selective", "full", "full-but-attention"),
    "precision": lambda: PRECISIONS,
}


def _option(kind: Any, help: str, *names: str, values: str | None = None) -> Any:
    complete = None if values is None else starting_with(_VALUES[values])
    return Annotated[
        kind | None,
        typer.Option(*names, help=help, show_default=False, autocompletion=complete),
    ]


SHARED: dict[str, Any] = {
    "layout": _option(
        str, 'Degrees, as in "dp=2x2 tp=2 pp=2 cp=2 ep=2 etp=1"; dp=RxS is replicate x shard.'
    ),
    "machine": _option(str, "Machine preset (h100, gb200, …) or TOML file.", values="machine"),
    "gpus": _option(int, "Number of GPUs; with a layout, the product of its degrees."),
    "zero": _option(
        str, "ZeRO stage 0 to 3, or FSDP's name for it (default 3; 1 with pp > 1).", values="zero"
    ),
    "gather": _option(
        str, "How often ZeRO-3 gathers weights: step or microbatch (default step with pp > 1)."
    ),
    "grad_dtype": _option(
        str, "Dtype in which gradients are accumulated and reduced: fp32 or bf16 (default fp32)."
    ),
    "unit_size": _option(
        float, "MB of weights in a flat unit (default: a block; small ones joined up to 25)."
    ),
    "prefetch": _option(int, "Blocks that ZeRO-3 gathers ahead; 0: none (default 1)."),
    "schedule": _option(
        str, "Pipeline schedule by name, auto, or a file (default 1f1b).", values="schedule"
    ),
    "chunks": _option(int, "Stages on each pipeline rank (default: the schedule's minimum)."),
    "stage_layers": _option(str, 'Layers of each stage, as in "7,8,8,7" (default: by cost).'),
    "microbatches": _option(int, "Microbatches per step (default: the smallest legal ≥ 2·pp)."),
    "microbatch_size": _option(int, "Sequences in a microbatch (default 1)."),
    "seq": _option(int, "Tokens in a sequence (default: 8192 or the model's maximum)."),
    "batch": _option(int, "Global batch in sequences (default: dp × microbatches × size)."),
    "context": _option(str, f"Context kind: {', '.join(CONTEXT_KINDS)}.", values="context"),
    "recompute": _option(
        str,
        "Recompute: none, selective, full[:K], full-but-attention, modules as in norm+mlp; some "
        "stages: full@0-1.",
        values="recompute",
    ),
    "balance": _option(
        str, "Load balancing of experts: aux, aux-seq, aux-global, z, bias, capacity:C, none; a+b."
    ),
    "ep_nodes": _option(
        int, "Nodes of an ep group; each gets a token once (default: the machine's)."
    ),
    "tp_keep": _option(
        str, "Input that column GEMMs save: shard (gathered again in backward) or gathered."
    ),
    "tp_overlap": _option(
        int, "Tensor collectives beside matmuls: 0 none, 1 in backward, K in K chunks (default 1)."
    ),
    "fp8": _option(str, "What shares a scale in fp8: tensorwise (default), blockwise or mxfp8."),
    "fp8_wgrad": _option(str, "Operands of weight gradients in fp8: fp8 or bf16 (default fp8)."),
    "fp8_gradients": _option(
        str, "Format of gradients in fp8: e4m3 or e5m2 (default e5m2; e4m3 if in blocks)."
    ),
    "fp8_matmul": _option(
        str, "Where a GPU has no units for fp8: emulated multiplies the rounded values (slow)."
    ),
    "fp8_skip": _option(str, "First and last layers that fp8 leaves in bf16 (default 0+0)."),
    "sp": _option(bool, "Turn sequence parallelism off.", "--no-sp"),
    "packed": _option(bool, "Pack documents, with document masks.", "--packed"),
    "set": _option(
        list[str], 'Any key of plan, training or model: "layers=4 lr=3e-4 zero=1".', "--set"
    ),
}


BackendOption = Annotated[
    str | None,
    typer.Option(
        help="Backend of collectives between GPUs: nccl or gloo (default: nccl if every rank has "
        "its own GPU or NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share one, else gloo).",
        show_default=False,
    ),
]

# Options of `plan`: how to search, and questions beside the search.
FixOption = Annotated[
    str | None, typer.Option(help='Values that a search must use: "tp=8 zero=1 schedule=zb-v".')
]
TokensOption = Annotated[
    float | None, typer.Option(help="Tokens of the full run, for days and GPU-hours.")
]
MtbfOption = Annotated[
    float | None,
    typer.Option(
        help="Hours between two failures of one GPU, for days with failures (default: the "
        "machine's).",
        show_default=False,
    ),
]
ObjectiveOption = Annotated[
    str, typer.Option(help="Best by: tokens (per second), gpus (fewest), gpu-hours (fewest).")
]
WhatIfOption = Annotated[
    str | None, typer.Option(help='Compare with a changed job: "gpus=2x", "machine=gb200".')
]
RunPrecisionOption = _option(
    str, f"Precision of linears: {', '.join(PRECISIONS)} (default: the plan's).", values="precision"
)
PrecisionOption = _option(str, f"Estimate in {', '.join(PRECISIONS)}.", values="precision")
KernelsOption = Annotated[
    str, typer.Option(help="compiled, eager or graphs: what blocks save, how they launch.")
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        help="As -o; with --serve, tokens of an answer instead (default 256).",
        show_default=False,
    ),
]
WrittenOption = Annotated[
    Path | None,
    typer.Option("-o", help="Write the plan as TOML, or with --emit what it prints."),
]
# Of `plan --serve`; `--emit` is for other targets as well.
SERVING: dict[str, Any] = {
    "serve": _option(bool, "Plan to serve the model, not to train it.", "--serve"),
    "prompt": _option(int, "With --serve: tokens of a prompt (default 2048)."),
    "rate": _option(float, "With --serve: requests a second."),
    "concurrency": _option(int, "With --serve: requests at a time."),
    "ttft": _option(float, "With --serve: most seconds to the first token."),
    "tpot": _option(float, "With --serve: most seconds between two tokens."),
    "kv": _option(str, "With --serve: format of the cache, bf16 or fp8 (default bf16)."),
    "emit": _option(
        str,
        "Print the plan for another program: megatron, bridge, torchtitan, torchtitan-main, "
        "deepspeed, nanotron, accelerate, axolotl; with --serve vllm, sglang or trtllm.",
    ),
    "model": _option(str, "The model of another framework's file, if that names none."),
}
OF_BRIDGES = ("emit", "model")  # that need no --serve
StackOption = Annotated[
    str | None,
    typer.Option(help="Price other people's software: nemo, torchtitan, a file."),
]
ImbalanceOption = Annotated[
    float | None, typer.Option(help="Load of the fullest expert over the mean; 1 is balanced.")
]
SweepOption = Annotated[
    str | None, typer.Option(help="Curves: seq=4k..1m, gpus=8..16384, tp=1..8, or tp.")
]
TableOption = Annotated[
    str | None, typer.Option(help="zero3-or-pipeline, data-or-model or memory.")
]
RunOption = Annotated[
    str | None, typer.Option("--run", help="A great run by name, beside our estimate of it.")
]
TextbookOption = Annotated[
    bool, typer.Option("--textbook", help="The textbook's formulas with their numbers.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(help='Compute-optimal size and tokens: "1e24" FLOPs or "512 h100 30 days".'),
]
RatioOption = Annotated[float, typer.Option(help="Tokens per active parameter, for --budget.")]
MfuOption = Annotated[float, typer.Option(help="Share of the peak that --budget assumes of GPUs.")]
