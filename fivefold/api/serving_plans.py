"""Serving plans: the answer of `fivefold plan --serve`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fivefold.api.checks import one_of
from fivefold.api.jobs import Model, given_job, reopened
from fivefold.core import FivefoldError, Machine
from fivefold.core import hardware as machines
from fivefold.core.layout import Layout, rules
from fivefold.core.model import Shape
from fivefold.core.model import presets as models
from fivefold.core.plan import PlanOptions
from fivefold.report.plan_answers import Printed

if TYPE_CHECKING:  # estimates need numpy
    from fivefold.planner.serving import EngineCommand, ServingChoice

# Formats of weights that some engine serves; fivefold's own has the first.
_PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class ServingAnswer:
    """A serving plan: `choice` has the layouts. `str()` is the text of `fivefold plan --serve`,
    `to_json()` its JSON, `flags` the command of another engine."""

    choice: ServingChoice

    @cached_property
    def _answer(self) -> Printed:
        from fivefold.report.serving_text import serving_answer

        return serving_answer(self.choice)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold plan --serve --json` prints."""
        return self._answer[0]

    def flags(self, engine: str) -> EngineCommand:
        """The choice as the command line of vllm, sglang or trtllm."""
        from fivefold.planner.serving import emit_flags

        return emit_flags(engine, self.choice.chosen)

    def __str__(self) -> str:
        return "\n".join(self._answer[1])


def plan_serving(
    model: Model,
    *,
    prompt: int = 2048,
    output: int = 256,
    rate: float | None = None,
    concurrency: int | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    kv: str = "bf16",
    precision: str | None = None,
    headroom: float = 0.05,
    imbalance: float = 1.0,
    price: float | None = None,
    **keys: Any,
) -> ServingAnswer:
    """The best layouts to serve a model on `gpus` GPUs of a `machine`, or a given `layout`.

    `rate` (requests a second) or `concurrency`: the load. `ttft` and `tpot`: bounds in seconds.
    `kv` and `precision`: formats of the cache and of weights. `keys` as for `plan`.
    """
    from fivefold.cost import require_possible_imbalance
    from fivefold.planner.serving import fit as serving_fit
    from fivefold.planner.serving import plans as serving

    job = reopened(given_job(model, keys))
    options = job.options
    if options.machine is None:
        raise FivefoldError(
            f"serving needs the machine: give one of {', '.join(machines.presets())}"
        )
    if not 0 <= headroom < 1:
        raise FivefoldError(f"--headroom {headroom}: give a share of the memory from 0 to below 1")
    shape, machine = _shape_of(options), machines.load(options.machine)
    one_of("kv", kv, serving_fit.KV_FORMATS)
    machine.peak(one_of("precision", precision or "bf16", _PRECISIONS))  # the chip may lack it
    require_possible_imbalance(shape, imbalance)
    layout = None if job.is_open else _layout_of(options, shape, machine, prompt)
    gpus = options.gpus or (1 if layout is None else layout.world)
    request = serving_fit.ServingRequest(
        *(shape, machine, gpus, prompt, output, rate, concurrency, ttft, tpot),
        *(precision or "bf16", kv, headroom, imbalance, price, layout),
    )
    return ServingAnswer(serving.plan_serving(request))


def _shape_of(options: PlanOptions) -> Shape:
    return models.with_overrides(models.load(options.model), options.set)


def _layout_of(options: PlanOptions, shape: Shape, machine: Machine, prompt: int) -> Layout:
    """The layout that was given."""
    layout = Layout.parse(options.layout, zero=0)
    if layout.cp > 1:
        raise FivefoldError(
            f"cp={layout.cp}: serving plans have no context parallelism; leave cp out"
        )
    layout = replace(layout, sp=shape.moe is not None and layout.tp > 1)
    rules.check(layout, shape, seq=max(prompt, layout.tp, 1), gpus=options.gpus)
    machine.tier_of((0, layout.world - 1))
    return layout
