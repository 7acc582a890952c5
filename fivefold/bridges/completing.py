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
    given = {name: value for name, value in read.items() if value is not None}
    for axis in (*_AXES, "shard"):
        if axis in given and given[axis] < 1:
            raise FivefoldError(f"{axis} = {given[axis]}: give a whole number of at least 1")
    notes: list[str] = []
    said = given.pop("world", None) or launched
    if gpus is not None and said is not None and gpus != said:
        notes.append(f"the file is for {said} GPUs; planned for the {gpus} of --gpus")
    given["shard"] = _shard(target, {**usual, **given}, given.get("shard"), gpus or said)
    dp = given["shard"] * {**usual, **given}["replicate"]
    given |= _batch(given, dp)
    for name in ("batch", "local_batch"):
        given.pop(name, None)
    if given.get("stage_layers") is None and given.get("pp", 1) == 1:
        given["chunks"] = None
    return {**usual, **{name: each for name, each in given.items() if name in usual}}, (*notes,)


def _shard(target: Target, values: Values, given: int | None, world: int | None) -> int:
    """Ranks that shard: as given, or what the other degrees leave."""
    others = values["replicate"] * values["tp"] * values["pp"] * values["cp"]
    shown = " · ".join(f"{axis} {values[axis]}" for axis in ("tp", "pp", "cp"))
    if values["replicate"] > 1:
        shown += f" · replicas {values['replicate']}"
    if given is not None:
        if world is not None and given * others != world:
            rule = f"dp {given} · {shown} = {given * others:,} ranks, and the job has {world:,}"
            raise FivefoldError(f"{rule}: the degrees must multiply to it; change one of them")
        return given
    if world is None:
        raise FivefoldError(
            f"{target.title} leaves data parallelism to the number of GPUs, which this file does "
            "not say: add --gpus N"
        )
    if world % others:
        below = world - world % others
        ways = " or ".join(f"{each:,}" for each in (below, below + others) if each)
        raise FivefoldError(
            f"{world:,} GPUs are no multiple of {shown} = {others:,}: use {ways} GPUs, or "
            "lower a degree"
        )
    return world // others


def _batch(given: Values, dp: int) -> Values:
    """Microbatches from the global batch, or from that of one data rank."""
    size, count, batch = (given.get(each) for each in ("microbatch_size", "microbatches", "batch"))
    local = given.get("local_batch")
    if local is not None:
        size = size or local
        if local % size:
            rule = f"{local} sequences of a data rank are no multiple of a microbatch of {size}"
            raise FivefoldError(f"{rule}: use a divisor")
        if batch is None:
            batch = local * dp
    if batch is None and count is None:
        return {} if size is None else {"microbatch_size": size}
    found = Batch.resolve(dp, 1, batch=batch, microbatch_size=size, microbatches=count)
    return {"microbatch_size": found.microbatch_size, "microbatches": found.microbatches}
