"""Options that several commands share, and how a key of `--set` is declared."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

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


class Key(NamedTuple):
    """A parameter of a command that is a key of `--set`, not a flag.

    A flag says what nearly every user of a command gives; all else is a key, so that the help of
    every command fits on a screen.
    """

    help: str


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
    "schedule": _option(
        str, "Pipeline schedule by name, auto, or a file (default 1f1b).", values="schedule"
    ),
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
    "set": _option(
        list[str],
        'Any key of plan, training, model or this command: "layers=4 lr=3e-4 packed=true".',
        "--set",
    ),
}
# Keys of a plan that are flags of `verify` too: each changes what is compared.
PACKED = _option(bool, "Pack documents, with document masks.", "--packed")
FP8 = _option(str, "What shares a scale in fp8: tensorwise (default), blockwise or mxfp8.")

BackendOption = Annotated[
    str | None,
    typer.Option(
        help="Backend of collectives between GPUs: nccl or gloo (default: nccl if every rank has "
        "its own GPU or NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share one, else gloo).",
        show_default=False,
    ),
]
RunPrecisionOption = _option(
    str, f"Precision of linears: {', '.join(PRECISIONS)} (default: the plan's).", values="precision"
)
PrecisionOption = _option(str, f"Estimate in {', '.join(PRECISIONS)}.", values="precision")
HeadroomKey = Annotated[float, Key("Share of the memory to leave free.")]
ImbalanceKey = Annotated[
    float | None, Key("Load of the fullest expert over the mean; 1 is balanced.")
]
