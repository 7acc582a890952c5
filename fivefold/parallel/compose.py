"""The order in which the dimensions are applied, on one screen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.plan import Plan
from fivefold.core.units import Row, pack, rows_of
from fivefold.core.weights import Piece, by_name, piece
from fivefold.model import recompute
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.init import initial
from fivefold.parallel import tensor
from fivefold.parallel.data import Blocks, Data
from fivefold.parallel.flat import Options, Owned
from fivefold.parallel.mesh import Mesh


@dataclass(frozen=True)
class Job:
    """A plan brought to life on one rank."""

    plan: Plan
    mesh: Mesh
    model: Decoder
    data: Data
    pieces: dict[str, Piece]

    @property
    def owned(self) -> list[Owned]:
        """What the optimizer of this rank updates."""
        return self.data.owned

    def copies(self, owned: Owned) -> int:
        """How many ranks of the world hold this very part of a weight."""
        sliced = self.plan.layout.zero >= 1 and self.mesh.size("fsdp") > 1
        return self.pieces[owned.row.name].copies * self.mesh.size(
            "replicate" if sliced else "dp-cp"
        )


def compose(
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None = None,
    offload: bool = False,
    bucket: int | None = None,
) -> Job:
    """Build one rank: the plain model, then tensor, data and recomputation."""
    shape, layout = plan.shape, plan.layout
    model = from_config(shape, dtype=dtype, device="meta")
    table, place = by_name(shape), mesh.place(tensor.AXIS)
    pieces = {
        name: piece(weight, shape, layout.tp, layout.sp, place) for name, weight in table.items()
    }

    def fill(row: Row) -> Tensor:
        whole = initial(table[row.name], shape, seed, dtype, mesh.device)
        return tensor.cut(whole, pieces[row.name])

    repeats = plan.recompute.kind == "full"
    tensor.split(model, mesh, layout.sp, shape.vocab, recompute_repeats=repeats)
    recompute.apply(model, plan.recompute.kind, plan.recompute.blocks)
    num_slices = mesh.size("fsdp") if layout.zero else 1
    units = pack(rows_of(shape, layout), num_slices, dtype.itemsize, bucket)
    options = Options(layout.zero, grad_dtype, offload, frozenset({"embed"}))
    data = Data(model, blocks_of(model), units, mesh, options, fill)
    return Job(plan, mesh, model, data, pieces)


def blocks_of(model: Decoder) -> Blocks:
    """The modules of each block of the weights' table, in forward order."""
    embed = {"embed": [model.embed]} if model.embed is not None else {}
    middle = {f"blocks.{name}": [block] for name, block in model.blocks.items()}
    if model.norm is None or model.head is None:
        return {**embed, **middle}
    return {**embed, **middle, "head": [model.norm, model.head]}
