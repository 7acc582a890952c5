"""What a file leaves open: ranks of data parallelism, and the batch identity."""

from __future__ import annotations

from fivefold.bridges.job_values import Values, usual_values
from fivefold.bridges.target import Target
from fivefold.core import FivefoldError
from fivefold.core.layout import Batch

_AXES = ("replicate", "tp", "pp", "cp", "ep", "etp")


def complete(
    target: Target, read: Values, gpus: int | None, launched: int | None
) -> tuple[Values, tuple[str, ...]]:
    """All values of a plan, and what was assumed; contradictions are refused with their rule."""
    usual = {**usual_values(), **target.always}
    values = {name: value for name, value in read.items() if value is not None}
    for axis in (*_AXES, "shard"):
        if axis in values and values[axis] < 1:
            raise FivefoldError(f"{axis} = {values[axis]}: give a whole number of at least 1")
    notes: list[str] = []
    world = values.pop("world", None) or launched
    if gpus is not None and world is not None and gpus != world:
        notes.append(f"the file is for {world} GPUs; planned for the {gpus} of --gpus")
    values["shard"] = _shard(target, {**usual, **values}, values.get("shard"), gpus or world)
    dp = values["shard"] * {**usual, **values}["replicate"]
    values |= _batch(values, dp)
    for name in ("batch", "local_batch"):
        values.pop(name, None)
    if values.get("stage_layers") is None and values.get("pp", 1) == 1:
        values["chunks"] = None
    return {
        **usual,
        **{name: read_value for name, read_value in values.items() if name in usual},
    }, (*notes,)


def _shard(target: Target, values: Values, shard: int | None, world: int | None) -> int:
    """Ranks that shard: as given, or what the other degrees leave."""
    other_ranks = values["replicate"] * values["tp"] * values["pp"] * values["cp"]
    shown = " · ".join(f"{axis} {values[axis]}" for axis in ("tp", "pp", "cp"))
    if values["replicate"] > 1:
        shown += f" · replicas {values['replicate']}"
    if shard is not None:
        if world is not None and shard * other_ranks != world:
            rule = (
                f"dp {shard} · {shown} = {shard * other_ranks:,} ranks, and the job has {world:,}"
            )
            raise FivefoldError(f"{rule}: the degrees must multiply to it; change one of them")
        return shard
    if world is None:
        raise FivefoldError(
            f"{target.title} leaves data parallelism to the number of GPUs, which this file does "
            "not say: add --gpus N"
        )
    if world % other_ranks:
        below = world - world % other_ranks
        ways = " or ".join(f"{count:,}" for count in (below, below + other_ranks) if count)
        raise FivefoldError(
            f"{world:,} GPUs are no multiple of {shown} = {other_ranks:,}: use {ways} GPUs, or "
            "lower a degree"
        )
    return world // other_ranks


def _batch(values: Values, dp: int) -> Values:
    """Microbatches from the global batch, or from that of one data rank."""
    size, count, batch = (values.get(key) for key in ("microbatch_size", "microbatches", "batch"))
    local = values.get("local_batch")
    if local is not None:
        size = size or local
        if local % size:
            rule = f"{local} sequences of a data rank are no multiple of a microbatch of {size}"
            raise FivefoldError(f"{rule}: use a divisor")
        if batch is None:
            batch = local * dp
    if batch is None and count is None:
        return {} if size is None else {"microbatch_size": size}
    batch_sizes = Batch.resolve(dp, 1, batch=batch, microbatch_size=size, microbatches=count)
    return {
        "microbatch_size": batch_sizes.microbatch_size,
        "microbatches": batch_sizes.microbatches,
    }
