"""The ledger's bytes are those of the tensors that a rank really holds, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from forked_steps import Setup, run, small_plan
from live_bytes import gathered_bytes
from torch import Tensor

from fivefold.cost.memory.static import static_bytes
from fivefold.launch.processes import Pool
from fivefold.optim.blockwise import BlockwiseUpdater
from fivefold.optim.optimizer import Updater
from fivefold.parallel.composition import Job
from fivefold.parallel.units.flat_unit import FlatUnit

ODD = {"kv_heads": "2", "vocab": "61", "ffn": "36"}  # nothing that fills a slice by itself
FLOATS = {"unit_size": 0.01}
NARROW = {"unit_size": 0.01, "grad_dtype": "bf16"}
CASES = [
    *((name, zero, FLOATS, Setup()) for name in ("dp=2", "dp=3", "dp=2x2") for zero in range(4)),
    *(("dp=2 tp=2", zero, {"unit_size": 0.003}, Setup(optimizer="sgd")) for zero in range(4)),
    *(("dp=2 tp=2", zero, {}, Setup(offload=True)) for zero in (1, 3)),
    *(("dp=1", zero, {}, Setup(offload=True)) for zero in (2, 3)),
    ("tp=2", 3, FLOATS, Setup()),
    *((layout, zero, NARROW, Setup()) for layout in ("dp=1", "dp=2x2") for zero in range(4)),
    *(("dp=2x2", zero, FLOATS, Setup(offload=True, offload_grads="cpu")) for zero in (2, 3)),
    ("dp=1", 0, FLOATS, Setup(offload=True, offload_grads="cpu")),
    ("dp=3 tp=2", 2, NARROW, Setup(offload=True, offload_grads="cpu")),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "zero", "keys", "setup"), CASES, ids=str)
def test_measured_is_predicted(
    layout: str, zero: int, keys: dict[str, Any], setup: Setup, pool: Pool
) -> None:
    plan = small_plan(layout, ODD, zero=zero, microbatches=2, **keys)
    for rank, found in enumerate(run(pool, plan, setup, measured)):
        predicted = static_bytes(
            plan,
            rank,
            itemsize=setup.itemsize,
            optimizer=setup.optimizer,
            offload=setup.offload,
            offload_grads=setup.offload_grads != "none",
        )
        assert found == {
            "device": predicted.device,
            "optimizer": predicted.optimizer + predicted.scalars,
            "host": predicted.host,
        }, f"rank {rank}"


GATHERED = [
    ("dp=2", {}),
    ("dp=2", {"gather": "step"}),
    ("dp=2", {"recompute": "full:2", "tied": "true"}),
    ("dp=2 pp=2", {}),
    ("dp=2 pp=2", {"gather": "microbatch"}),
    ("dp=2 pp=2", {"gather": "microbatch", "schedule": "zb-h1", "recompute": "full:2"}),
    ("dp=2 pp=2", {"gather": "microbatch", "schedule": "zb-v", "tied": "true"}),
    ("dp=2 pp=2", {"gather": "step", "schedule": "zb-v"}),
]
# Experts in all layers, after two dense ones, or in every second layer.
EXPERTS = [
    ("dp=2", {}),
    ("dp=2", {"moe.first_dense": "2", "recompute": "full:2"}),
    ("dp=4 ep=2", {"moe.every": "2"}),
    ("dp=2 ep=2", {"moe.every": "2"}),  # they are not sharded
    ("tp=2", {"moe.first_dense": "1"}),  # they are, and nothing else is
    ("dp=2 pp=2", {"gather": "microbatch", "schedule": "zb-h1"}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [0.003, 0.009, 0.02])
@pytest.mark.parametrize(("layout", "options"), GATHERED, ids=str)
def test_gathered_weights(
    layout: str, options: dict[str, str], size: float, prefetch: int, pool: Pool
) -> None:
    changes = {"layers": "6", "tied": options.get("tied", "false")}
    said = {name: value for name, value in options.items() if name != "tied"}
    plan = small_plan(layout, changes, zero=3, unit_size=size, prefetch=prefetch, **said)
    for rank, found in enumerate(run(pool, plan, Setup(), gathered)):
        assert found == gathered_bytes(plan, rank, 4) > 0, f"rank {rank}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("size", [0.009, 0.05, 0.2])
@pytest.mark.parametrize(("layout", "options"), EXPERTS, ids=str)
def test_gathered_experts(
    layout: str, options: dict[str, str], size: float, prefetch: int, pool: Pool
) -> None:
    changes = {name: value for name, value in options.items() if "." in name}
    said = {name: value for name, value in options.items() if "." not in name}
    sizes = {"layers": "6", "moe.experts": "4", "moe.top_k": "2", "moe.ffn": "24"} | changes
    plan = small_plan(layout, sizes, zero=3, unit_size=size, prefetch=prefetch, **said)
    for rank, found in enumerate(run(pool, plan, Setup(), gathered)):
        assert found == gathered_bytes(plan, rank, 4) > 0, f"rank {rank}"


def test_no_unit_but_the_first_is_gathered_where_it_is_used(pool: Pool) -> None:
    """Dense or expert, forward and backward: a block finds its weights under way."""
    sizes = {"layers": "4", "moe.experts": "4", "moe.top_k": "2", "moe.ffn": "24"}
    keys = {"zero": 3, "gather": "microbatch", "unit_size": 0.04}
    changes = sizes | {"moe.first_dense": "1"}
    for size in (0.04, 0.009):  # a block of several units is gathered ahead whole
        split = small_plan("dp=2", changes, **(keys | {"unit_size": size}))
        for late in run(pool, split, Setup(), gathered_late):
            assert set(late) == {"embed.weight"}
    for late in run(pool, small_plan("dp=2", changes, prefetch=0, **keys), Setup(), gathered_late):
        assert len(set(late)) > 4, "nothing is gathered ahead"


def test_while_a_block_runs_the_next_one_is_gathered_whole(pool: Pool) -> None:
    """The order of gathers: all units of the next block begin before this one computes, in both
    directions, and none of the block after it."""
    sizes = {"layers": "4", "moe.experts": "4", "moe.top_k": "2", "moe.ffn": "24"}
    keys = {"zero": 3, "gather": "microbatch", "unit_size": 0.009}
    for found in run(pool, small_plan("dp=2", sizes, **keys), Setup(), gathered_while):
        assert max(num_units for _, _, num_units in found) > 3, "blocks of several units"
        for began, expected, _ in found:
            assert began == expected
        # Five blocks come after another; backward reads no weight of the embedding.
        assert sum(bool(began) for began, _, _ in found) == 5 + 4


def gathered_while(job: Job, *_: object) -> Callable[[], list[tuple[set[str], set[str], int]]]:
    """For every block of the last step that is entered or comes back: the weights whose gather
    begins while it runs, those of the next block, and the number of their units."""
    data = job.chunks[0].data
    order = list(dict.fromkeys(block for unit in data.units for block in unit.use.blocks))
    enter, back = data._enter, data._return
    found: list[tuple[set[str], set[str], int]] = []

    def names(units: list[FlatUnit]) -> set[str]:
        return {entry.row.name for unit in units for entry in unit.unit.entries}

    def note(units: list[FlatUnit], step: int, run: Callable[[], None]) -> None:
        here = [order.index(block) for unit in units for block in unit.use.blocks]
        place = (max(here) if step > 0 else min(here)) + step
        after = order[place] if 0 <= place < len(order) else None
        coming = [
            unit
            for unit in data.units
            if after in unit.use.blocks
            and not unit.present
            and (step > 0 or unit.use.read_in_backward)
        ]
        before = [unit for unit in data.units if not unit.present and unit not in units]
        run()
        began = [unit for unit in before if unit.present]
        found.append((names(began), names(coming), len(coming)))

    def entered(units: list[FlatUnit], after: list[FlatUnit]) -> None:
        if units[0].use.blocks[0] == order[0]:
            found.clear()
        note(units, +1, lambda: enter(units, after))

    def returned(units: list[FlatUnit], *others: list[FlatUnit]) -> None:
        note(units, -1, lambda: back(units, *others))

    data._enter, data._return = entered, returned  # type: ignore[method-assign]
    return lambda: found


def gathered_late(job: Job, *_: object) -> Callable[[], list[str]]:
    """The first weight of every unit whose gather begins in the block that waits for it."""
    data, late = job.chunks[0].data, list[str]()
    enter, back = data._enter, data._return

    def note(units: list[FlatUnit]) -> None:
        late.extend(unit.unit.entries[0].row.name for unit in units if not unit.present)

    def entered(units: list[FlatUnit], after: list[FlatUnit]) -> None:
        note(units)
        enter(units, after)

    def returned(units: list[FlatUnit], *others: list[FlatUnit]) -> None:
        note([unit for unit in units if unit.use.read_in_backward])
        back(units, *others)

    data._enter, data._return = entered, returned  # type: ignore[method-assign]
    return lambda: late


def gathered(job: Job, *_: object) -> Callable[[], int]:
    """The most bytes of whole weights that were here at once."""
    units, most = [unit for unit in job.units if unit.sheds_weights], [0]

    def note() -> None:
        here = sum(unit.full.untyped_storage().nbytes() for unit in units)
        most[0] = max(most[0], here)

    for unit in units:
        gather = unit.gather
        unit.gather = lambda gather=gather: (gather(), note())[0]  # type: ignore[method-assign]
    return lambda: most[0]


def measured(job: Job, optimizer: Updater) -> Callable[[], dict[str, int]]:
    """What a rank holds in front of the last step of its optimizer."""
    found: dict[str, int] = {}
    update = optimizer.step

    def measure_and_update() -> None:
        found.update(held(job, optimizer))
        update()

    optimizer.step = measure_and_update  # type: ignore[method-assign]
    return lambda: found


def held(job: Job, optimizer: Updater) -> dict[str, int]:
    """Bytes by place. Without a GPU both places are host memory, so a tensor's part says which."""
    units, states = list(job.units), optimizer.tensors()
    offload = isinstance(optimizer, BlockwiseUpdater) and optimizer.recipe.offload != "none"
    mine = [*states, *(unit.shard for unit in units if unit.sheds_weights)]
    buffers = [
        one
        for unit in units
        for one in (unit.full, unit.gradients, unit.sent, unit.received, unit.gradient)
        if one is not None and one is not unit.home
    ]
    parameters = [one for unit in units for one in unit.parameters.values()]
    gradients = [one.grad for one in parameters if one.grad is not None]
    homes = [unit.home for unit in units if unit.home is not None]
    reduced = [] if homes else [each.grad for each in job.owned]
    on_device = [*buffers, *gradients, *reduced]
    mine += homes
    return {
        "device": storage(on_device if offload else [*on_device, *mine]),
        "optimizer": 0 if offload else storage(states),
        "host": storage(mine) if offload else 0,
    }


def storage(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind these tensors, each piece of it counted once."""
    found: dict[Any, int] = {}
    for tensor in tensors:
        memory = tensor.untyped_storage()
        found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())
