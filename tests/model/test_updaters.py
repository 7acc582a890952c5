"""Updaters: one arithmetic wherever states live, narrow states, narrow weights."""

from __future__ import annotations

import errno
import gc
import os
import pkgutil
import resource
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.units import LocalWeight
from fivefold.core.layout.weight_table import Role, decays
from fivefold.core.plan.recipe import OPTIMIZERS, Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.optim import blockwise, disk_states
from fivefold.optim.blockwise import LINE, BlockwiseUpdater, blocks_of
from fivefold.optim.disk_states import DiskStore
from fivefold.optim.optimizer import ADAM_EPS, Updater, make_optimizer
from fivefold.optim.rounding import round_stochastically, rounding_bits
from fivefold.optim.updater import make_updater

CPU = torch.device("cpu")
TORCH_OPTIMIZERS = [name for name, kind in OPTIMIZERS.items() if not kind.full_matrices]
SHAPES = ((96, 100), (16,), (4, 4), (3, 40, 30), (5, 7), (61, 70))
ROLES: tuple[Role, ...] = ("matrix", "norm", "matrix", "matrix", "bias", "embedding")
SMALL, LARGE = 1, 10**9  # bytes of a block: one line, or everything


@dataclass
class Weight:
    row: LocalWeight
    tensor: Tensor
    grad: Tensor
    start: int = 0
    factor: Tensor | None = None


def some_weights(dtype: torch.dtype = torch.float32, block: str = "blocks.0") -> list[Weight]:
    generator = torch.Generator().manual_seed(0)
    rows = [
        LocalWeight(f"w{i}", block, shape, role=role)
        for i, (shape, role) in enumerate(zip(SHAPES, ROLES, strict=True))
    ]
    drawn = [torch.randn(row.shape, generator=generator).to(dtype) for row in rows]
    return [Weight(row, one, torch.zeros(row.shape)) for row, one in zip(rows, drawn, strict=True)]


def give_gradients(weights: Sequence[Weight], number: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1000 + number)
    for each in weights:
        each.grad = torch.randn(each.tensor.shape, generator=generator).to(dtype)


def updated(
    weights: list[Weight], updater: Updater, steps: int | range, master: bool = False
) -> list[Tensor]:
    """Copies of the weights after these steps, each with a learning rate of its own."""
    for number in range(steps) if isinstance(steps, int) else steps:
        give_gradients(weights, number, torch.float32 if master else weights[0].tensor.dtype)
        updater.set_lr(1e-2 / (1 + number))
        updater.step()
    return [each.tensor.clone() for each in weights]


def of(recipe: Recipe, weights: list[Weight], **more: Any) -> Updater:
    return make_updater(recipe, weights, CPU, **more)


def assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_every_optimizer_has_a_name_and_a_factory() -> None:
    assert all(callable(pkgutil.resolve_name(kind.factory)) for kind in OPTIMIZERS.values())


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_plain_updater_is_torchs_own(name: Any, dtype: torch.dtype) -> None:
    plain, ours = some_weights(dtype), some_weights(dtype)
    pairs = [(decays(each.row.role), each.tensor) for each in plain]
    optimizer = make_optimizer(name, pairs, 1e-2, 0.1, ADAM_EPS)
    updater = of(Recipe(optimizer=name, lr=1e-2), ours)
    for number in range(3):
        for weights in (plain, ours):
            give_gradients(weights, number, dtype)
        for each in plain:
            each.tensor.grad = each.grad
        optimizer.step()
        updater.step()
    assert_equal([each.tensor for each in plain], [each.tensor for each in ours])
    assert updater.count == 3
    first = some_weights(dtype)
    assert not any(
        torch.equal(each.tensor, start.tensor) for each, start in zip(ours, first, strict=True)
    )


PLACES = ["cpu", "nvme:"]
OFFLOADED = {"offload": "cpu"}


def place(offload: str, folder: Path) -> str:
    return f"nvme:{folder}" if offload == "nvme:" else offload


@pytest.mark.parametrize("offload", PLACES)
@pytest.mark.parametrize("block_bytes", [SMALL, 100_000, LARGE])
@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("master", [False, True])
def test_offloaded_states_give_the_same_bits(
    offload: str, block_bytes: int, name: Any, master: bool, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    here, away = some_weights(dtype), some_weights(dtype)
    one = of(Recipe(optimizer=name), here, master=master)
    recipe = Recipe(optimizer=name, offload=place(offload, tmp_path))
    other = of(recipe, away, master=master, block_bytes=block_bytes)
    assert_equal(updated(here, one, 3, master), updated(away, other, 3, master))
    left, right = one.states(), other.states()
    assert left.keys() == right.keys() and ("master" in left) == master
    for key in left:
        for mine, theirs in zip(left[key], right[key], strict=True):
            assert mine is not None and theirs is not None
            assert torch.equal(mine.read().flatten(), theirs.read().flatten())


@pytest.mark.parametrize("master", [False, True])
def test_narrow_states_are_the_same_wherever_they_live(
    master: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, found = torch.float16 if master else torch.float32, []
    for offload, block_bytes in (("none", LARGE), ("cpu", SMALL), (f"nvme:{tmp_path}", 50_000)):
        weights = some_weights(dtype)
        recipe = Recipe(states="bf16", offload=offload, seed=3)
        updater = of(recipe, weights, master=master, block_bytes=block_bytes)
        found.append(updated(weights, updater, 3, master))
        monkeypatch.setattr(blockwise, "ROUNDED_AT_ONCE", 1000)  # the others are rounded in pieces
        kept = updater.states()["exp_avg_sq"][0]
        assert kept is not None and kept.read().dtype == torch.bfloat16
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    weights = some_weights(dtype)
    recipe = Recipe(states="bf16", seed=4)
    other = updated(weights, of(recipe, weights, master=master), 3, master)
    assert not torch.equal(other[0], found[0][0])


def test_the_last_element_of_a_window_is_rounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of one element: the last of 1001 in windows of 1000, or a weight of one element."""
    moments: list[list[Tensor]] = []
    for window in (1000, 1 << 22):
        monkeypatch.setattr(blockwise, "ROUNDED_AT_ONCE", window)
        rows = [LocalWeight(f"w{size}", "blocks.0", (size,)) for size in (1001, 1)]
        weights = [Weight(row, torch.ones(row.shape), torch.zeros(row.shape)) for row in rows]
        updater = of(Recipe(states="bf16"), weights)
        updated(weights, updater, 2)
        states = [state for state in updater.states()["exp_avg"] if state is not None]
        moments.append([state.read().flatten() for state in states])
    assert_equal(*moments)
    assert all(moment[-1] != 0 for moment in moments[0])


def test_an_optimizer_gets_no_group_without_tensors() -> None:
    """torch's own skip such a group; one that calls `torch._foreach_add_` on it fails."""
    weight = torch.ones(3)
    for decayed, rate in ((True, 0.1), (False, 0.0)):
        (group,) = make_optimizer("adamw", [(decayed, weight)], 1e-2, 0.1).param_groups
        assert group["params"][0] is weight and group["weight_decay"] == rate


RESUMED = [
    {"optimizer": "adamw"},
    {"optimizer": "sgd"},
    {"optimizer": "muon"},
    {"states": "bf16"},
    {"offload": "cpu"},
    {"offload": "nvme:", "states": "bf16"},
]


@pytest.mark.parametrize("changes", RESUMED, ids=str)
@pytest.mark.parametrize("master", [False, True])
def test_states_taken_to_a_new_updater_go_on_as_before(
    changes: dict[str, str], master: bool, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    if "offload" in changes:
        changes = changes | {"offload": place(changes["offload"], tmp_path)}
    recipe = Recipe(**changes)  # type: ignore[arg-type]
    weights = some_weights(dtype)
    updater = of(recipe, weights, master=master, block_bytes=40_000)
    updated(weights, updater, 3, master)
    later = some_weights(dtype)
    fresh = of(recipe, later, master=master, block_bytes=LARGE)
    for old, new in zip(weights, later, strict=True):
        new.tensor.copy_(old.tensor)
    before, there = updater.states(), fresh.states()
    for key in before:
        for source, target in zip(before[key], there[key], strict=True):
            assert (source is None) == (target is None)
            if source is not None and target is not None:
                target.write(source.read().clone())
    fresh.resume_after(updater.count)
    steps = range(3, 6)
    assert_equal(updated(weights, updater, steps, master), updated(later, fresh, steps, master))
    assert updater.count == fresh.count == 6


@pytest.mark.parametrize("changes", [*({"optimizer": name} for name in OPTIMIZERS), OFFLOADED])
def test_norms_and_biases_do_not_decay(changes: Any) -> None:
    """Whatever their dims: biases of stacked experts have two."""
    weights = some_weights()
    before = [each.tensor.clone() for each in weights]
    of(Recipe(lr=0.1, weight_decay=0.5, **changes), weights).step()  # gradients are zero
    for each, old in zip(weights, before, strict=True):
        shrinks = 0.95 if each.row.role in ("matrix", "embedding") else 1.0
        torch.testing.assert_close(each.tensor, old * shrinks)


def test_a_master_keeps_what_bfloat16_would_lose() -> None:
    """Steps of 1e-5 are below half of what bfloat16 tells apart near 1."""
    row = LocalWeight("w", "blocks.0", (8,))
    moved = []
    for master in (True, False):
        dtype = torch.float32 if master else torch.bfloat16
        weight = Weight(row, torch.ones(8, dtype=torch.bfloat16), torch.ones(8, dtype=dtype))
        updater = of(Recipe(lr=1e-5), [weight], master=master)
        for _ in range(1000):
            updater.step()
        moved.append(1 - float(weight.tensor[0]))
        assert all(state.grad is None for state in updater.tensors()), "their memory is free again"
    assert moved[0] == pytest.approx(0.01, rel=0.2) and moved[1] == 0


def test_blocks_hold_everything_once_and_keep_to_their_size() -> None:
    sizes = [3 * LINE + 5, 7, 0, 2 * LINE, 1, LINE - 1]
    for most in (1, LINE, 2 * LINE + 17, 10**9):
        cut = blocks_of(sizes, most)
        limit = max(LINE, most)
        assert all(sum(span.size for span in block) <= limit for block in cut)
        spans = [span for block in cut for span in block]
        assert all(span.start % LINE == 0 for span in spans)
        for number, size in enumerate(sizes):
            mine = [span for span in spans if span.index == number]
            ends = [0, *(span.stop for span in mine)]
            assert [span.start for span in mine] == ends[:-1] and ends[-1] == size


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.3, 1e-20, 7e30, 1.0])
def test_stochastic_rounding_is_right_on_average(value: float) -> None:
    size = 200_000
    values = torch.full((size,), value)
    row = LocalWeight("w", "blocks.0", (size,))
    found = round_stochastically(values, rounding_bits(0, 1, row, 0, size, CPU)).double()
    exact = values.double()
    low, high = found.min(), found.max()
    assert low <= exact[0] <= high
    if value == 1.0:
        assert low == high
        return
    assert high - low == pytest.approx(abs(value) * 2**-8, rel=1.0)  # neighbours, no further
    # Six standard deviations of the mean of so many; each is at most half of the gap.
    assert abs(found.mean() - exact[0]) <= 6 * 0.5 * (high - low) / size**0.5


def test_the_second_half_of_the_bits_rounds_as_well() -> None:
    row, size = LocalWeight("w", "blocks.0", (1 << 17,)), 1 << 17
    bits = rounding_bits(5, 2, row, 0, size, CPU)
    values = torch.full((size,), 1 + 2**-8)
    ups = [round_stochastically(values, half) > 1 for half in (bits, bits >> 16)]
    for up in ups:
        assert float(up.double().mean()) == pytest.approx(0.5, abs=6 * 0.5 / size**0.5)
    together = float((ups[0] & ups[1]).double().mean())
    assert together == pytest.approx(0.25, abs=6 * 0.5 / size**0.5)


def test_bits_depend_on_what_they_should() -> None:
    row, alone = (
        LocalWeight("w", "blocks.0", (64,)),
        LocalWeight("head.weight", "head", (64,), alone=True),
    )
    whole = rounding_bits(0, 1, row, 0, 64, CPU)
    assert torch.equal(whole, rounding_bits(0, 1, row, 0, 64, CPU))
    assert torch.equal(
        whole[20:50], rounding_bits(0, 1, row, 20, 30, CPU)
    )  # a part, on another rank
    for other in (
        rounding_bits(1, 1, row, 0, 64, CPU),
        rounding_bits(0, 2, row, 0, 64, CPU),
        rounding_bits(0, 1, LocalWeight("v", "blocks.0", (64,)), 0, 64, CPU),
    ):
        assert int((whole == other).sum()) < 4
    first = LocalWeight("embed.weight", "embed", (64,), alone=True)
    assert torch.equal(
        rounding_bits(0, 1, alone, 0, 64, CPU), rounding_bits(0, 1, first, 0, 64, CPU)
    )


def test_what_is_not_finite_stays_that() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan])
    values = torch.cat(
        [values, torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float)]
    )
    found = round_stochastically(values, torch.full((5,), -1, dtype=torch.int32))
    assert found[0] == torch.inf and found[1] == -torch.inf and bool(found[2:].isnan().all())


def test_a_second_moment_creeps_up_where_plain_rounding_stands_still() -> None:
    """One update of exp_avg_sq moves it by 5% of a difference too small for bfloat16."""
    row = LocalWeight("w", "blocks.0", (4096,))
    weight = Weight(row, torch.zeros(4096), torch.full((4096,), 1.03))
    updater = of(Recipe(states="bf16", lr=1e-9), [weight])
    kept = updater.states()["exp_avg_sq"][0]
    assert kept is not None
    kept.write(torch.ones(4096))
    updater.resume_after(1000)  # the bias correction is over
    plain = torch.ones(4096, dtype=torch.bfloat16)
    for _ in range(200):
        updater.step()
        plain = (plain.float() * 0.95 + 0.05 * 1.03**2).to(torch.bfloat16)
    assert float(plain.max()) == 1
    assert float(kept.read().double().mean()) == pytest.approx(1.03**2, abs=2e-3)


def test_a_disk_holds_three_blocks_in_memory_and_leaves_no_file(tmp_path: Path) -> None:
    weights = some_weights()
    recipe = Recipe(offload=f"nvme:{tmp_path / 'deep' / 'down'}")
    updater = of(recipe, weights, block_bytes=40_000)
    updated(weights, updater, 2)
    assert isinstance(updater, BlockwiseUpdater) and isinstance(updater.store, DiskStore)
    assert len(updater.store.regions) > 4
    assert sum(buffer.nbytes for buffer in updater.store.buffers) <= 3 * 41_000
    assert updater.store.num_bytes > 8 * sum(each.tensor.numel() for each in weights)
    assert list((tmp_path / "deep" / "down").iterdir()) == []


def disk_store(folder: Path, lines: int, block_bytes: int) -> DiskStore:
    """Two states of a weight with so many lines, 8 bytes an element."""
    dtypes = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
    return DiskStore(folder, 0, [lines * LINE], dtypes, False, block_bytes)


def test_no_block_on_disk_takes_more_bytes_than_it_may(tmp_path: Path) -> None:
    for block_bytes, lines in ((16 * LINE, 2), (16 * LINE - 1, 1)):
        store = disk_store(tmp_path, 4, block_bytes)
        sizes = [region.stop - region.start for region in store.regions]
        assert sizes == [8 * lines * LINE] * (4 // lines)


class LateExecutor:
    """Runs a task when its result is asked for, and what nobody asks for at the end."""

    def __init__(self, num_threads: int) -> None:
        self.results: list[LateResult] = []

    def __enter__(self) -> LateExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        for result in self.results:
            with suppress(OSError):  # as a thread's, it stays in its future
                result.result()

    def submit(self, function: Callable[..., Any], *args: Any) -> LateResult:
        self.results.append(LateResult(cache(partial(function, *args))))
        return self.results[-1]


@dataclass
class LateResult:
    """The future of a task of a `LateExecutor`."""

    result: Callable[[], Any]


def test_a_buffer_is_read_into_when_its_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_states, "ThreadPoolExecutor", LateExecutor)
    store = disk_store(tmp_path, 7, 8 * LINE)
    assert len(store.regions) == 7
    for number, (_, states) in enumerate(store.walk(), 1):
        for state in (*states["exp_avg"], *states["exp_avg_sq"]):
            assert not state.any()
            state.fill_(number)
    for key in ("exp_avg", "exp_avg_sq"):
        (state,) = store.states(key)
        assert state is not None
        assert state.read().view(7, LINE).unique(dim=1).flatten().tolist() == [*range(1, 8)]


@pytest.mark.parametrize("number", range(4))
def test_a_disk_that_fails_to_write_any_block_ends_the_update(tmp_path: Path, number: int) -> None:
    store = disk_store(tmp_path, 4, 8 * LINE)
    write = store.file.write

    def failing(buffer: Tensor, offset: int) -> None:
        if offset == store.regions[number].start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(buffer, offset)

    store.file.write = failing
    with pytest.raises(OSError, match="Input/output error"):
        list(store.walk())


def test_a_full_disk_is_met_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FivefoldError, match=r"needs 32768\.000 GiB for optimizer states") as caught:
        DiskStore(tmp_path, 7, [2**43], {"exp_avg": torch.float32}, False, block_bytes=2**46)
    assert f"{tmp_path}/states-00007-" in str(caught.value) and "GiB free" in str(caught.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FivefoldError, match="cannot make a file in"):
        of(Recipe(offload=f"nvme:{tmp_path}/file"), some_weights())


def checksum(weight: Weight, offload: str) -> int:
    """Of a weight after two updates, made in place."""
    weight.tensor.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    updater = of(Recipe(offload=offload), [weight], block_bytes=4_000_000)
    for number in range(2):
        weight.grad.copy_(weight.tensor).add_(number)
        updater.step()
    return zlib.crc32(weight.tensor.numpy())


def with_memory_capped(worker: Worker, folder: Path) -> tuple[int, str, int]:
    """The checksum without a cap, what the cap does to states in memory, and that from disk."""
    row = LocalWeight("w", "blocks.0", (4096, 4096))
    weight = Weight(row, torch.zeros(row.shape), torch.zeros(row.shape))
    plain = checksum(weight, "none")
    gc.collect()  # the first updater, whose states would be room to the next
    lines = Path("/proc/self/status").read_text().splitlines()
    (used,) = (int(line.split()[1]) for line in lines if line.startswith("VmData"))
    # What the allocator has reserved by then is room as well: it is taken first.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * used, most))
    taken: list[Tensor] = []
    with suppress(RuntimeError):
        while len(taken) < 1000:
            taken.append(torch.empty_like(weight.tensor))
    # States are two of these, and there is room for one and a half.
    limit = 1024 * used + 3 * weight.tensor.nbytes // 2
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    refusal = "none"
    try:
        checksum(weight, "none")
    except RuntimeError as error:
        refusal = str(error)
    return plain, refusal, checksum(weight, f"nvme:{folder}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux caps the data of a process")
def test_states_larger_than_memory_are_updated_from_disk(tmp_path: Path) -> None:
    with Pool(1) as pool:
        plain, refusal, from_disk = pool.run(with_memory_capped, tmp_path)[0]
    assert "not enough memory" in refusal or "allocate memory" in refusal
    assert from_disk == plain
