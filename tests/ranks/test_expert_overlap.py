"""What goes on while tokens travel to their experts: the other lane, and the shared experts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from forked_steps import STEPS, Setup, run, small_plan
from torch import Tensor, nn

from fivefold.core.plan.plan import Plan
from fivefold.core.schedule.schedule import Overlap, Step
from fivefold.launch.processes import Pool
from fivefold.model import slots
from fivefold.model.attention import Attention
from fivefold.model.layers import Linear, Mlp
from fivefold.model.moe import MoeMlp
from fivefold.optim.optimizer import Updater
from fivefold.parallel import expert, transport
from fivefold.parallel.composition import Job
from fivefold.parallel.mesh import Issued
from fivefold.parallel.stage import ActionObserver

DEPARTS, ARRIVES = "departs", "arrives"
WEIGHTS_DEPART, WEIGHTS_ARRIVE = "weights depart", "weights arrive"  # with the rows, in their turn
MOVES = (DEPARTS, ARRIVES, WEIGHTS_DEPART, WEIGHTS_ARRIVE)
EXPERTS = ("gate", "up", "down")


class Event(NamedTuple):
    """A computation that begins, or an all-to-all that departs or has been waited for."""

    lane: int  # 0 forward, 1 backward, where there are two
    what: str


class Noted(torch.autograd.Function):
    """Nothing, but it says when it is passed in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, say: Callable[[], None]) -> Tensor:
        ctx.say = say
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.say()
        return gradients[0], None


def events(job: Job, *_: object) -> Callable[[], list[list[Event]]]:
    """Of the last step, cut where a pair or a single action begins."""
    found: list[list[Event]] = []
    main, mesh = threading.get_ident(), job.mesh
    issue = mesh.issue

    def say(what: str) -> None:
        found[-1].append(Event(int(threading.get_ident() != main), what))

    class Actions(ActionObserver):
        def begin(self, action: Step) -> None:
            if action == job.pipeline.steps[0]:
                found.clear()
            found.append([])

    class Journey(NamedTuple):
        issued: Issued
        arrives: str

        def wait(self) -> Any:
            rows = self.issued.wait()
            say(self.arrives)
            return rows

    def noted(axis: str, kind: str, *rest: Any, **how: Any) -> Any:
        if kind != "all_to_all":
            return issue(axis, kind, *rest, **how)
        say(DEPARTS if how["yields"] else WEIGHTS_DEPART)
        arrives = ARRIVES if how["yields"] else WEIGHTS_ARRIVE
        return Journey(issue(axis, kind, *rest, **how), arrives)

    def watch(leaf: nn.Module | None, name: str) -> None:
        product: Any = leaf.matmul  # type: ignore[union-attr]

        def noted(*given: Tensor) -> Tensor:
            say(name)
            return Noted.apply(product(*given), lambda: say(f"{name} backward"))

        leaf.matmul = noted  # type: ignore[assignment,union-attr]

    def watch_projections(mlp: Mlp) -> None:
        project = mlp.project

        def noted(x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
            say("shared projections")
            gate, up = project(x, linears)
            return [Noted.apply(gate, lambda: say("shared projections backward")), up]

        mlp.project = noted  # type: ignore[assignment]

    for module in (module for chunk in job.chunks for module in chunk.model.modules()):
        if isinstance(module, Attention):
            watch(module.out, "attention")
        elif isinstance(module, MoeMlp):
            for name in EXPERTS:
                watch(getattr(module.experts, name), f"expert {name}")
            if module.shared is not None:
                watch(module.shared.down, "shared down")
                watch_projections(module.shared)
    mesh.issue = noted  # type: ignore[method-assign]
    job.pipeline.observer = Actions()
    return lambda: found


def plan_with_experts(layout: str, layers: int, shared: int, **options: Any) -> Plan:
    sizes = {"moe.experts": "4", "moe.top_k": "2", "moe.ffn": "16", "layers": str(layers)}
    sizes |= {"moe.shared": str(shared), "moe.shared_ffn": str(16 * shared)}
    return small_plan(layout, sizes, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
def test_the_other_lane_computes_while_tokens_travel(pool: Pool, schedule: str) -> None:
    """In each pair, behind each all-to-all of either lane: dispatch, combine, and the counts."""
    plan = plan_with_experts("dp=2 pp=2 ep=2", 4, shared=0, schedule=schedule, microbatches=8)
    for rank, found in enumerate(run(pool, plan, Setup(), events)):
        steps = plan.schedule.order[plan.layout.coord(rank).pp]
        pairs = [one for one in found if {event.lane for event in one} == {0, 1}]
        assert len(pairs) == sum(isinstance(one, Overlap) for one in steps)
        layers = plan.shape.layers // plan.schedule.num_stages
        for pair in pairs:
            assert computed_meanwhile(pair, 0) == [True] * 3 * layers
            assert computed_meanwhile(pair, 1) == [True] * 2 * layers


def computed_meanwhile(pair: list[Event], lane: int) -> list[bool]:
    """For each all-to-all of a lane, whether the other one computed before it was waited for."""
    found: list[bool] = []
    under_way = False
    for event in pair:
        if event.lane == lane and event.what in (DEPARTS, ARRIVES):
            under_way = event.what == DEPARTS
            found += [False] if under_way else []
        elif under_way and event.lane != lane and event.what not in MOVES:
            found[-1] = True
    return found


def test_shared_experts_run_while_tokens_travel(pool: Pool) -> None:
    plan = plan_with_experts("dp=2 ep=2", 1, shared=1, microbatches=1)
    gate, up, down = EXPERTS
    for found in run(pool, plan, Setup(), events):
        forward, backward = ([event.what for event in one] for one in found)
        assert forward == [
            "attention",
            *(DEPARTS, ARRIVES),  # counts
            *(DEPARTS, WEIGHTS_DEPART),
            *("shared projections", "shared down"),
            *(ARRIVES, WEIGHTS_ARRIVE),
            *(f"expert {name}" for name in (up, gate, down)),
            *(DEPARTS, ARRIVES),  # combine
        ]
        shared = ["shared down backward", "shared projections backward"]
        experts = [f"expert {name} backward" for name in (down, gate, up)]
        assert backward == [
            *(DEPARTS, ARRIVES),  # combine
            *experts,
            *(WEIGHTS_DEPART, DEPARTS, *shared, WEIGHTS_ARRIVE, ARRIVES),  # dispatch
            "attention backward",
        ]


DISPATCH = {module.__file__ for module in (expert, transport, slots)}
READS = ("tolist", "item", "nonzero", "__int__", "__bool__", "__index__", "__float__")


def host_reads(job: Job, updater: Updater) -> Callable[[], list[tuple[str, int]]]:
    """Where a dispatch reads numbers of the device, over all steps; and the exchanges of counts.
    Nothing else in these files may wait for the device."""
    found: list[tuple[str, int]] = []
    patch = pytest.MonkeyPatch()

    def counted(name: str) -> None:
        read = getattr(Tensor, name)

        def counting(tensor: Tensor, *rest: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_filename in DISPATCH:
                found.append((f"{frame.f_code.co_name} {name}", tensor.numel()))
            return read(tensor, *rest)

        patch.setattr(Tensor, name, counting)

    def look() -> list[tuple[str, int]]:
        patch.undo()
        return found

    for name in READS:
        counted(name)
    return look


@pytest.mark.sample(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("layout", "waits", "options"),
    [
        ("dp=2 ep=2", 1, {}),
        ("dp=2 ep=2", 1, {"balance": "capacity:1"}),
        ("dp=2 ep=2", 0, {"balance": "capacity-pad:1.25"}),
        ("dp=4 ep=4", 1, {"ep_nodes": 2}),
        ("dp=2 ep=2", 1, {"ep_nodes": 2, "balance": "capacity:1"}),
    ],
    ids=str,
)
def test_the_host_waits_for_counts_once_a_layer_and_microbatch(
    pool: Pool, layout: str, waits: int, options: dict[str, Any], recompute: str
) -> None:
    """Also over nodes and where the forward runs again; never where the capacity is fixed."""
    plan = plan_with_experts(layout, 2, shared=0, microbatches=2, recompute=recompute, **options)
    times = waits * STEPS * plan.batch.microbatches * plan.shape.layers
    for found in run(pool, plan, Setup(), host_reads):
        assert len(found) == times, found
        assert {where for where, _ in found} <= {"read_on_host tolist"}
