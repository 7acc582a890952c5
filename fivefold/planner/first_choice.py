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
    pairs = [(code, choice) for (code, _), choice in result.simple.items()]
    pairs += [(int(complexity(choice.grid, domain).item()), choice) for choice in result.best]
    simple = [pair for pair in pairs if pair[0] < own and pair[1].seconds <= limit]
    simple.sort(key=lambda pair: (pair[0], pair[1].seconds))
    for start in range(0, len(simple), _AT_ONCE):
        layouts = [layout for _, layout in simple[start : start + _AT_ONCE]]
        for layout in simulated(space, setting, layouts):
            if layout.seconds <= limit:
                candidate = rebalance_stages(estimate(layout))
                if candidate.step <= limit and candidate.over <= 0:
                    return candidate
    return rebalance_stages(fastest)


def why_simpler(estimate: Estimate, other: Estimate) -> str:
    """In what one plan is simpler than another; empty if it is not."""
    own_grid, other_grid = grid_of_plan(estimate.plan), grid_of_plan(other.plan)
    return simpler_words(own_grid, other_grid, innermost(estimate.setting.machine))


def tp_leaves_domain(estimate: Estimate) -> bool:
    """Whether tensor parallelism of a plan crosses more than the innermost link."""
    return bool(tp_crosses(grid_of_plan(estimate.plan), estimate.setting.machine).item())


def is_same(estimate: Estimate, other: Estimate) -> bool:
    """Whether two plans are the same but for the layers of their stages."""
    own_options, other_options = (
        replace(candidate.plan.options, stage_layers=None) for candidate in (estimate, other)
    )
    return own_options == other_options
