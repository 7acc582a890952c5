"""Optimizers over the shards that a rank owns. `make_updater` makes the one that a recipe asks for.

The registry is `OPTIMIZERS` in `core/plan/recipe.py`: names, facts that planning needs, and for
each optimizer the function of this package that makes it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fivefold.core.plan import BLOCK_OF_STATES, Recipe
from fivefold.optim.blockwise import BlockwiseUpdater, MemoryStore, Store, state_dtypes
from fivefold.optim.disk_states import BLOCK_BYTES, DiskStore
from fivefold.optim.muon import FullMatrices, LocalMatrices
from fivefold.optim.optimizer import DeviceUpdater, OwnedWeight, Updater
from fivefold.optim.rounding import FullWeight


def make_updater(
    recipe: Recipe,
    owned: Sequence[OwnedWeight],
    device: torch.device,
    *,
    master: bool = False,
    rank: int = 0,
    matrices: FullMatrices | None = None,
    full: Mapping[str, FullWeight] | None = None,
    late: bool = False,
    block_bytes: int | None = None,
) -> Updater:
    """Create the updater of a recipe for the shards of a rank; gradients are on `device`.

    `master` makes float32 copies of narrower weights. `matrices` gathers full matrices for an
    optimizer that needs them, and `full` has the full weight of every shard by name; without these,
    the rank owns full weights. `late`: gradients are converted and clipped when they are used, so
    block by block. `block_bytes` limits the states that are updated at once where states or
    gradients are not on the device as they are computed with.
    """
    if recipe.optimizer_kind.full_matrices:
        make = pkgutil.resolve_name(recipe.optimizer_kind.factory)
        return make(recipe, owned, matrices or LocalMatrices(), master)
    if recipe.offload == "none" and recipe.states == "fp32" and not late:
        return DeviceUpdater(recipe.optimizer, owned, recipe.lr, recipe.weight_decay, master)
    values = torch.float32 if master or not owned else owned[0].tensor.dtype
    assert recipe.states == "fp32" or values.itemsize >= 4, "bfloat16 states need wider weights"
    dtypes = state_dtypes(recipe, values, master)
    sizes = [weight.tensor.numel() for weight in owned]
    offloaded, pinned = recipe.offload != "none", device.type == "cuda"
    if recipe.disk is not None:
        most = block_bytes or BLOCK_BYTES
        store: Store = DiskStore(Path(recipe.disk), rank, sizes, dtypes, pinned, most)
    else:
        home, most = torch.device("cpu") if offloaded else device, block_bytes or BLOCK_OF_STATES
        store = MemoryStore(sizes, dtypes, home, pinned and offloaded, most)
    return BlockwiseUpdater(recipe, owned, store, device, master, full)
