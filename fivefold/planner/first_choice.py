"""The first choice of a search: the simplest of the layouts that estimates cannot tell from the
fastest. The search keeps the fastest layout of each complexity; they are simulated, the simplest
first, until one is within the bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fivefold.cost import grid_of_plan
from fivefold.planner.candidates import LayoutCandidate, SearchResult
from fivefold.planner.error_bars import accuracy
from fivefold.planner.estimate import Estimate
from fivefold.planner.rebalance import rebalance_stages
from fivefold.planner.search import simulated
from fivefold.planner.setting import EstimateSetting
from fivefold.planner.simplicity import complexity, innermost, simpler_words, tp_crosses
from fivefold.planner.space import SearchSpace

_AT_ONCE = 16  # simple layouts that are simulated together


def first_choice(
    space: SearchSpace,
    setting: EstimateSetting,
    result: SearchResult,
    fastest: Estimate,
    estimate: Callable[[LayoutCandidate], Estimate],
) -> Estimate:
    """The simplest layout that is equal to the fastest, with the best stages."""
    limit = (1 + accuracy().equal) * fastest.step
    domain = innermost(setting.machine)
    own = int(complexity(grid_of_plan(fastest.plan), domain).item())
    # Bounds told what may be equal to the fastest; simulated, more of the candidates are.
    pairs = [(code, one) for (code, _), one in result.simple.items()]
    pairs += [(int(complexity(one.grid, domain).item()), one) for one in result.best]
    simple = [pair for pair in pairs if pair[0] < own and pair[1].seconds <= limit]
    simple.sort(key=lambda pair: (pair[0], pair[1].seconds))
    for start in range(0, len(simple), _AT_ONCE):
        layouts = [layout for _, layout in simple[start : start + _AT_ONCE]]
        for layout in simulated(space, setting, layouts):
            if layout.seconds <= limit:
                found = rebalance_stages(estimate(layout))
                if found.step <= limit and found.over <= 0:
                    return found
    return rebalance_stages(fastest)


def why_simpler(one: Estimate, other: Estimate) -> str:
    """In what one plan is simpler than another; empty if it is not."""
    here, there = grid_of_plan(one.plan), grid_of_plan(other.plan)
    return simpler_words(here, there, innermost(one.setting.machine))


def tp_leaves_domain(one: Estimate) -> bool:
    """Whether tensor parallelism of a plan crosses more than the innermost link."""
    return bool(tp_crosses(grid_of_plan(one.plan), one.setting.machine).item())


def is_same(one: Estimate, other: Estimate) -> bool:
    """Whether two plans are the same but for the layers of their stages."""
    here, there = (replace(each.plan.options, stage_layers=None) for each in (one, other))
    return here == there
