"""Stages cut anew for one plan: by its seconds, not by FLOPs, and by the whole of its schedule.

Layers move one by one to where the longest path gets shorter, and the clock decides whether that
was a gain. No stage gets more layers than the fullest has, and the first none, so that memory is no
worse. Recomputation is the same in every stage: the runtime has no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np

from fivefold.core.estimate.grid import of_plan
from fivefold.core.estimate.layer import Clockwork
from fivefold.core.estimate.outlook import Outlook, outlook
from fivefold.core.estimate.paths import FORMS, Numbers
from fivefold.core.estimate.pipeline import dealer
from fivefold.core.estimate.timing import path_costs
from fivefold.core.plan import resolve

Cut = tuple[int, ...]
_MOST_MOVES = 8
_LEAST_GAIN = 1e-3  # of a step: less is not worth a plan with stages of its own


def recut(chosen: Outlook) -> Outlook:
    """The plan with other stages, where they make it faster."""
    plan = chosen.plan
    if plan.layout.pp == 1 or plan.schedule.name not in FORMS or plan.stage_layers is not None:
        return chosen
    given = tuple(map(len, plan.stages))
    best = _descended(chosen, given)
    if best == given:
        return chosen
    wishes = replace(plan.wishes, stage_layers=",".join(map(str, best)))
    played = outlook(resolve(wishes), chosen.setting, chosen.offload)
    return played if played.step < (1 - _LEAST_GAIN) * chosen.step else chosen


def _descended(chosen: Outlook, given: Cut) -> Cut:
    """Move after move, as long as one helps."""
    seconds = _Seconds(chosen)
    best, least = given, seconds.of(given)
    for _ in range(_MOST_MOVES):
        found = {cut: seconds.of(cut) for cut in _moves(best, given)}
        if not found or min(found.values()) >= least:
            break
        best = min(found, key=found.__getitem__)
        least = found[best]
    return best


def _moves(cut: Cut, given: Cut) -> Iterator[Cut]:
    """A layer from an end or a full stage to an end or to one that has room."""
    last, most = len(cut) - 1, max(given)
    full = [place for place, size in enumerate(cut) if size == most]
    room = [place for place in range(1, len(cut)) if cut[place] < most]
    givers = {0, last, *full[:1], *full[-1:]}
    takers = {last, *room[:2], *room[-2:]} & set(room)
    if cut[0] < given[0]:
        takers.add(0)
    for giver, taker in product(givers, takers):
        if giver != taker and cut[giver] > 1:
            step = {giver: -1, taker: 1}
            yield tuple(size + step.get(place, 0) for place, size in enumerate(cut))


class _Seconds:
    """The longest path of one plan under any cut."""

    def __init__(self, chosen: Outlook) -> None:
        plan, setting = chosen.plan, chosen.setting
        seq, batch = plan.batch.seq, plan.batch
        asked = (plan.shape, setting.machine, setting.stack, of_plan(plan), seq)
        costs = path_costs(Clockwork(*asked, *setting.how))
        self.costs = np.array([float(np.asarray(each).item()) for each in costs])[:, None]
        self.dealer, self.form = dealer(plan.shape, seq), FORMS[plan.schedule.name]
        layout = plan.layout
        self.numbers = Numbers(layout.pp, layout.chunks, batch.microbatches, self.costs)

    def of(self, cut: Cut) -> float:
        spans = [range(start, stop) for start, stop in pairwise((0, *accumulate(cut)))]
        return float((self.form(self.dealer.stages(spans), self.numbers) @ self.costs).max())
