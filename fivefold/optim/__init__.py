"""Which updater a recipe asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fivefold.core.errors import FivefoldError
from fivefold.core.recipe import Recipe
from fivefold.optim.blockwise import Blockwise, MemoryStore, Store, state_dtypes
from fivefold.optim.disk_states import BLOCK_BYTES, DiskStore
from fivefold.optim.muon import Matrices, Muon, Uncut
from fivefold.optim.optimizer import OwnedWeight, Resident, Updater

_IN_MEMORY = 256_000_000  # bytes of states that are on the device at once


def make_updater(
    recipe: Recipe,
    owned: Sequence[OwnedWeight],
    device: torch.device,
    *,
    master: bool = False,
    rank: int = 0,
    matrices: Matrices | None = None,
    block_bytes: int | None = None,
) -> Updater:
    """The updater of a recipe over what a rank owns; `device` is where gradients come.

    `master` keeps float32 copies of narrower weights. `matrices` says how Muon makes parts of a
    matrix whole; without it all are. `block_bytes` bounds the states that are updated at once where
    they do not live on the device.
    """
    if recipe.optimizer == "muon":
        if recipe.offload != "none" or recipe.states != "fp32":
            raise FivefoldError(
                "muon keeps its momentum on the device in float32: train with offload = none and "
                "states = fp32, or with optimizer = adamw"
            )
        return Muon(recipe, owned, matrices or Uncut(), master)
    name = recipe.optimizer
    if recipe.offload == "none" and recipe.states == "fp32":
        return Resident(name, owned, recipe.lr, recipe.weight_decay, master)
    values = torch.float32 if master or not owned else owned[0].tensor.dtype
    assert recipe.states == "fp32" or values.itemsize >= 4, "narrow states need wide values"
    dtypes = state_dtypes(recipe, name, values, master)
    sizes = [each.tensor.numel() for each in owned]
    away, pinned = recipe.offload != "none", device.type == "cuda"
    store: Store
    if recipe.disk is not None:
        store = DiskStore(
            Path(recipe.disk), rank, sizes, dtypes, pinned, block_bytes or BLOCK_BYTES
        )
    else:
        home = torch.device("cpu") if away else device
        size = block_bytes or _IN_MEMORY
        store = MemoryStore(sizes, dtypes, home, pinned and away, size)
    return Blockwise(recipe, name, owned, store, device, master)
