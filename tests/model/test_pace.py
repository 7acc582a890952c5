"""What a rank tells of its pace: of waits, the shortest where computation waits; of messages, new
ones alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import torch

from fivefold.launch.watch.watchdog import Watchdog
from fivefold.parallel.mesh import CollectiveRecord
from fivefold.parallel.wait_timer import WaitTimer
from fivefold.records.stragglers import RankPace
from fivefold.train.callbacks.pace import EVERY, PaceCallback

TENSOR, DATA = ("tp", "all_reduce"), ("dp-cp", "all_reduce")


def test_a_pace_has_what_is_new_since_the_last_exchange() -> None:
    timer, paces = WaitTimer(torch.device("cpu")), list[RankPace]()
    mesh: Any = SimpleNamespace(size=lambda axis: 2, coord=lambda axis: 0, timer=timer)

    rows = SimpleNamespace(
        share=lambda row: paces.append(RankPace.from_row(json.loads(json.dumps(row)))),
        take=lambda: None,
    )
    callback = PaceCallback(cast("Watchdog", SimpleNamespace(pace=rows, stalls=list)))
    callback.watch(mesh)
    message = cast("CollectiveRecord", SimpleNamespace(axis="pp", kind="send"))
    for number in range(1, 2 * EVERY + 1):
        callback.before_step(number)
        for kind in (TENSOR, TENSOR, DATA):
            timer.waited(kind, timer.timestamp())
        callback.begin(message, (0, 1))
        callback.measure(number)
    assert len(paces) == 2
    for pace in paces:
        assert pace.waited.keys() == {"dp-cp"}
        assert all(len(seconds) == EVERY for seconds in pace.waited.values())
        assert pace.least.keys() == {TENSOR}  # an overlapped wait shows its sum, not its shortest
        assert pace.least[TENSOR][1] == 2
        assert [len(times) for times in pace.sends.values()] == [4], "the newest ones"
