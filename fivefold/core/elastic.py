"""Another number of ranks for the same training: data parallelism gives way, the batch stays."""

from __future__ import annotations

from dataclasses import replace

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, resolve


def refit(plan: Plan, world: int) -> Plan:
    """The plan on so many ranks, with the dp that fills them and the same global batch.

    tp, cp, pp and experts stay: they are how the model fits.
    """
    layout, batch = plan.layout, plan.batch
    if world == layout.world:
        return plan
    fixed = layout.tp * layout.cp * layout.pp
    dp, rest = divmod(world, fixed)
    if rest or not dp:
        raise FivefoldError(
            f"{world} ranks were started, and the layout {layout} takes {layout.world}: only dp "
            f"can give way, so start a multiple of tp · cp · pp = {fixed} ranks"
        )
    each, rest = divmod(batch.sequences, dp * batch.microbatch_size)
    if rest or not each:
        raise FivefoldError(
            f"{world} ranks leave dp={dp}, which does not divide the global batch "
            f"{batch.sequences} into microbatches of {batch.microbatch_size}: start another number "
            "of ranks, or set microbatch_size"
        )
    changed = replace(layout, replicate=1, shard=dp)
    wishes = replace(plan.wishes, layout=str(changed), microbatches=each, gpus=None)
    note = f"dp={dp} instead of {layout.dp}, for {world} ranks were started; the batch stays"
    fitted = resolve(wishes)
    return replace(fitted, notes=(*plan.notes, note))
