"""The order of calls in any layout: a step ends even if every call blocks, and the plan's own names
of the ranks do not matter."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.groups import Topology
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.cost.traffic.order import prove_order
from fivefold.rehearse.rank import rehearse_rank
from fivefold.rehearse.trace import Traces

SCHEDULES = [family.name for family in FAMILIES if not family.asynchronous]
MOST_RANKS = 8


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A small job with up to 8 ranks over any of the axes."""
    degrees = {axis: draw(st.sampled_from([1, 2])) for axis in ("dp", "tp", "cp")}
    degrees["pp"] = draw(st.sampled_from([1, 2, 2, 4]))
    assume(1 < prod(degrees.values()) <= MOST_RANKS)
    experts = draw(st.booleans())
    inside = prod(degrees[axis] for axis in ("dp", "tp", "cp"))
    degrees["ep"] = draw(st.sampled_from([each for each in (1, 2, 4) if inside % each == 0]))
    if not experts:
        degrees["ep"] = 1
    order = draw(st.sampled_from(["", " order=tp-cp-pp-dp"]))
    options = PlanOptions(
        "tiny-moe" if experts else "tiny",
        layout=" ".join(f"{axis}={degree}" for axis, degree in degrees.items()) + order,
        zero=draw(st.integers(0, 3)),
        schedule=draw(st.sampled_from(SCHEDULES)) if degrees["pp"] > 1 else "1f1b",
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        microbatches=2 * degrees["pp"],
        seq=32,
        precision="bf16",
        set={
            "layers": str(2 * degrees["pp"]),
            "vocab": "64",
            "tied": draw(st.sampled_from(["true", "false"])),
        },
    )
    try:
        return resolve(options, small=True)
    except FivefoldError:
        assume(False)
        raise


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=20)
@given(plans())
def test_a_step_ends_in_any_layout(plan: Plan) -> None:
    traces = Traces()
    calls = {rank: rehearse_rank(plan, rank, traces).calls for rank in range(plan.layout.world)}
    found = prove_order(Topology.of(plan), calls)
    assert found.ok, (str(plan.layout), found.cycle, found.unconnected, found.differing)
    assert found.ranks == plan.layout.world
