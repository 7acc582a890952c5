"""`fivefold verify`: compare a layout with one device, and its collectives with the prediction."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from fivefold.api.verifying import VERIFIED_OPTIMIZERS, verify
from fivefold.core import RankLost
from fivefold.core.plan import PlanOptions
from fivefold.verbs import (
    FP8,
    PACKED,
    BackendOption,
    Key,
    as_given,
    json_text,
    shown_progress,
    with_plan_options,
)


@partial(with_plan_options, default_target="tiny", flags={"packed": PACKED, "fp8": FP8})
def run(
    options: PlanOptions,
    command: typer.Context,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 2,
    optimizer: Annotated[str, Key(f"{' or '.join(VERIFIED_OPTIMIZERS)}.")] = "adamw",
    offload: Annotated[str, Key("Offload weights and optimizer states: none or cpu.")] = "none",
    precision: Annotated[
        str | None, typer.Option(help="fp8 or mxfp8: round matmuls on both sides (docs/fp8.md).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda: processes take the GPUs in turn.")
    ] = "cpu",
    backend: BackendOption = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the kernels of the ranks, as training does.")
    ] = False,
    generate: Annotated[bool, Key("Compare generation with the plain forward.")] = False,
    batch_invariant: Annotated[
        bool, Key("With generate: the requests of a batch may not change a bit.")
    ] = False,
    patience: Annotated[
        float | None, Key("Seconds without a sign of any rank after which it is lost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove that a layout computes the same as one device: run both here and compare."""
    job = as_given(options, command)
    try:
        with shown_progress("verify") as on_progress:
            verdict = verify(
                job,
                dtype=dtype,
                steps=steps,
                optimizer=optimizer,
                offload=offload,
                precision=precision,
                seed=seed,
                device=device,
                backend=backend,
                compile=compiled,
                generate=generate,
                batch_invariant=batch_invariant,
                patience=patience,
                on_progress=on_progress,
            )
    except RankLost as lost:
        if as_json:
            typer.echo(json_text({"passed": False, "error": lost.reason}))
        typer.echo(f"fivefold: {lost.reason}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json_text(verdict.to_json()) if as_json else str(verdict))
    raise typer.Exit(0 if verdict.passed else 1)
