"""Stand-ins for the collectives of a rank that is alone: which, for how long, and their waits."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from fivefold.commands.rehearse import rehearse
from fivefold.core import FivefoldError
from fivefold.core import hardware as machines
from fivefold.core.plan import PlanOptions, resolve
from fivefold.cost.hardware import Links
from fivefold.parallel import CollectiveRecord, Mesh
from fivefold.rehearse.contention import contended_step, link_seconds, moved_bytes
from fivefold.rehearse.rank import rehearse_rank


def plan_of(model: str, **keys: Any) -> Any:
    return resolve(PlanOptions(model, **keys))


@pytest.mark.parametrize(
    "layout, schedule",
    [
        ("dp=2 tp=2 pp=2 cp=2 ep=2", "zb-h1"),
        ("pp=2 dp=4 ep=4", "dualpipe-v"),
        ("tp=4 dp=2", "1f1b"),
    ],
)
def test_every_collective_has_a_stand_in(
    layout: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop around a ring is one, though it is sent and received."""
    plan = plan_of(
        "tiny-moe", layout=layout, schedule=schedule, microbatches=4, seq=64, precision="bf16"
    )
    stood: Counter[CollectiveRecord] = Counter()
    original = Mesh.of

    def stand_in(record: CollectiveRecord, members: tuple[int, ...], pending: Any) -> Any:
        assert len(members) == record.group
        stood[record] += 1
        return pending

    def of(*arguments: Any, **keys: Any) -> Mesh:
        mesh = original(*arguments, **keys)
        mesh.replace_collectives(stand_in)
        return mesh

    monkeypatch.setattr(Mesh, "of", of)
    run = rehearse_rank(plan, 1, None)
    hops = {("ring", "recv")}
    issued = {
        record: count
        for record, count in run.records.items()
        if record.kind != "connect" and (record.axis, record.kind) not in hops
    }
    assert stood == issued and sum(stood.values()) > 10


def test_a_stand_in_lasts_as_long_as_the_links() -> None:
    machine = machines.load("h100")
    links = Links(machine, np.array([64.0]))
    gather = CollectiveRecord("tp", "all_gather", 1 << 20, 8)
    near = link_seconds(links, gather, tuple(range(8)))
    far = link_seconds(links, gather, tuple(range(0, 64, 8)))
    assert near == pytest.approx(float(links.ring(*map(np.array, (8.0 * 2**20, 8.0, 1.0)))))
    assert far > 3 * near
    assert moved_bytes(gather) == 7 * 2**20
    assert moved_bytes(gather._replace(kind="all_reduce")) == 2 * 7 / 8 * 2**20
    message = partial(CollectiveRecord, "pp", bytes=1 << 20, group=2)
    sent, received = (link_seconds(links, message(kind=kind), (0, 8)) for kind in ("send", "recv"))
    assert sent == received > 0


def test_waits_are_summed_by_axis() -> None:
    waited = {("fsdp", "all_gather"): [0.1, 0.2], ("dp-cp", "all_reduce"): [0.1]}
    step = contended_step(2.0, {**waited, ("tp", "all_gather"): [0.25]}, alone=1.0)
    assert step.exposed == pytest.approx({"dp": 0.4, "tp": 0.25})
    assert step.slowed == pytest.approx(0.35)


@pytest.mark.parametrize("keys", [{"machine": "h100"}, {"device": "cuda"}])
def test_contend_needs_a_gpu_and_a_machine(keys: dict[str, str]) -> None:
    with pytest.raises(FivefoldError, match="--contend puts kernels in place of collectives"):
        rehearse("tiny", layout="dp=2", contend=True, **keys)
