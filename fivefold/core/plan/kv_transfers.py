"""Where the cache of a sequence is in a layout, and what travels when another layout goes on.

Splits   as `kv_pages.py` says: pp by layers, tp by KV heads, which are replicated where they are
         fewer than its ranks; a latent is on every rank of tp. dp by sequences: those of one
         replica are at one data coordinate. cp by blocks: whoever has a block sends it, and all
         ranks of the target's cp get it, since blocks have no owner there before they are taken.
Moves    each layer and head once to every rank of the target that has it; replicated heads come
         from several ranks in turn.
Costs    for each token the bytes that all ranks of the target's replica keep of it (times its cp).
Refuses  what only some of the layers of a window would keep (`problems`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fivefold.core.model import Shape, rank_kv_heads, token_bytes
from fivefold.core.plan.plan import Plan


@dataclass(frozen=True)
class KvShare:
    """What a rank has of the cache: layers, and KV heads in each."""

    layers: range
    heads: range


@dataclass(frozen=True)
class KvRoute:
    """What one rank of a layout sends to one rank of another."""

    source: int
    target: int
    layers: range
    heads: range


def kv_share(plan: Plan, rank: int) -> KvShare:
    """The share of a rank."""
    at = plan.layout.coord(rank)
    return KvShare(plan.stages[at.pp], kv_heads_at(plan.shape, plan.layout.tp, at.tp))


def kv_heads_at(shape: Shape, tp: int, coord: int) -> range:
    """The KV heads of a rank of tp. All ranks have the one latent."""
    if shape.mla is not None:
        return range(1)
    first = coord * shape.kv_heads // tp
    return range(first, first + rank_kv_heads(shape, tp))


def kv_routes(source: Plan, target: Plan, home: int = 0, target_home: int = 0) -> list[KvRoute]:
    """All routes from the replica `home` of one layout to that of another, by target."""
    routes: list[KvRoute] = []
    source_layout, theirs = source.layout, target.layout
    for pp, cp, tp in product(range(theirs.pp), range(theirs.cp), range(theirs.tp)):
        rank = theirs.rank(dp=target_home, cp=cp, tp=tp, pp=pp)
        share = kv_share(target, rank)
        for stage, (heads, coords) in product(range(source_layout.pp), _by_heads(source).items()):
            layers = _common(source.stages[stage], share.layers)
            common = _common(heads, share.heads)
            if not layers or not common:
                continue
            turn = coords[tp % len(coords)]
            for part in range(source_layout.cp):
                sender = source_layout.rank(dp=home, cp=part, tp=turn, pp=stage)
                routes.append(KvRoute(sender, rank, layers, common))
    return routes


def moved_bytes(target: Plan, tokens: int, itemsize: int) -> int:
    """Bytes that travel for so many tokens of a sequence."""
    layers, layout = target.shape.layers, target.layout
    on_rank = token_bytes(target.shape, layers, layout.tp, itemsize)
    return tokens * on_rank * layout.tp * layout.cp


def problems(shape: Shape) -> Iterator[str]:
    """Every reason why a cache cannot travel."""
    if shape.window_everywhere is not None:
        yield (
            f"all layers see {shape.window_everywhere:,} tokens, and blocks that have left this "
            "window do not travel: leave --prefill out"
        )


def _by_heads(plan: Plan) -> dict[range, list[int]]:
    """The coordinates of tp that have the same heads."""
    coords_by_heads: dict[range, list[int]] = {}
    for coord in range(plan.layout.tp):
        coords_by_heads.setdefault(kv_heads_at(plan.shape, plan.layout.tp, coord), []).append(coord)
    return coords_by_heads


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
