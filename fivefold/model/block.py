"""One layer of the decoder: attention and MLP or experts, with their norms and the residual.

Its seam, `Block.repeats`, is one of those that `model/decoder.py` lists.

Legend: B rows, S tokens, D model width, K choices of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.core.model import Module, Shape
from fivefold.model.attention import Attention, LatentAttention
from fivefold.model.batch import Context
from fivefold.model.dropout import Part, dropping, site_of
from fivefold.model.layers import Mlp, Norm, ResidualNorm, WeightFactory
from fivefold.model.mixer_layer import MixerLayer
from fivefold.model.moe import MoeMlp
from fivefold.model.remake import saving


class Block(nn.Module):
    """One layer: attention, then MLP, dropped and added to the residual; or both side by side.
    Norms are before them, after them, or both.

    Block i is one of multi-token prediction where i is not below the number of layers.
    """

    def __init__(self, shape: Shape, i: int, factory: WeightFactory) -> None:
        super().__init__()
        layer = min(i, shape.layers)
        self.is_global = shape.is_global_layer(min(i, shape.layers - 1))
        moe = shape.moe if shape.is_moe_layer(layer) else None
        self.number, self.dropout, self.drop = i, shape.dropout, dropping(factory.fuse)
        self.parallel, inner, outer = shape.parallel_block, shape.inner_norms, shape.outer_norms
        self.attention_norm = ResidualNorm(shape, factory) if inner else None
        self.attention = _attention(shape, factory, site_of(i, "pairs"))
        self.attention_out_norm = _outer_norm(shape, factory) if outer else None
        self.mlp_norm = ResidualNorm(shape, factory) if inner > 1 else None
        self.mlp = (
            MoeMlp(shape, moe, factory) if moe else Mlp(shape, shape.ffn, shape.mlp_bias, factory)
        )
        self.mlp_out_norm = _outer_norm(shape, factory) if outer else None
        self.mlp_kind: Module = "experts" if moe else "mlp"
        # Of the layers with experts, whose choices may be replayed; none of multi-token prediction.
        self.route = shape.moe_layers.index(i) if moe and i < shape.layers else None
        self.repeats: frozenset[Module] = frozenset()  # seam: recomputation

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        context = context.of_layer(self.is_global)
        normed_BSD, x_BSD = _normed(self.attention_norm, x_BSD)
        if self.parallel:
            also_BSD = normed_BSD  # one norm serves both
            if self.mlp_norm is not None:
                also_BSD, x_BSD = self.mlp_norm(x_BSD)
            x_BSD = x_BSD + self._attended(normed_BSD, context)
            return x_BSD + self._passed(also_BSD, context)
        # What attention gives has no name here, which would keep its memory while the MLP runs.
        normed_BSD, x_BSD = _normed(self.mlp_norm, x_BSD, self._attended(normed_BSD, context))
        return x_BSD + self._passed(normed_BSD, context)

    def _attended(self, x_BSD: Tensor, context: Context) -> Tensor:
        """What attention adds to the residual."""
        attend = partial(self.attention, context=context)
        y_BSD = self._run("attention", attend, x_BSD)
        if self.attention_out_norm is not None:
            y_BSD = self.attention_out_norm(y_BSD)
        return self._drop("attention", y_BSD, context)

    def _passed(self, x_BSD: Tensor, context: Context) -> Tensor:
        """What MLP or experts add to the residual."""
        mlp = self.mlp
        if context.replayed is not None and self.route is not None:
            mlp = partial(self.mlp, replayed_BSK=context.replayed[:, :, self.route])
        y_BSD = self._run(self.mlp_kind, mlp, x_BSD)
        if self.mlp_out_norm is not None:
            y_BSD = self.mlp_out_norm(y_BSD)
        return self._drop("mlp", y_BSD, context)

    def _drop(self, part: Part, x_BSD: Tensor, context: Context) -> Tensor:
        if context.sites is None or not self.dropout:
            return x_BSD
        return self.drop(x_BSD, context.sites.of(site_of(self.number, part)), self.dropout)

    def _run(self, name: Module, run: Callable[[Tensor], Tensor], x_BSD: Tensor) -> Tensor:
        """A module, whose forward may run again in backward."""
        if name not in self.repeats:
            return run(x_BSD)

        def plain(x: Tensor) -> Tensor:  # inside, GEMMs save their input as any other
            return run(x.view_as(x))

        with saving(x_BSD):
            return checkpoint(plain, x_BSD, use_reentrant=False, preserve_rng_state=False)


def _outer_norm(shape: Shape, factory: WeightFactory) -> Norm:
    return Norm(shape.width, shape.norm_bias, shape, factory)


def _normed(
    norm: ResidualNorm | None, x_BSD: Tensor, y_BSD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum as what comes next reads it, normed or not, and the sum."""
    if norm is not None:
        return norm(x_BSD, y_BSD)
    total_BSD = x_BSD if y_BSD is None else x_BSD + y_BSD
    return total_BSD, total_BSD


def _attention(
    shape: Shape, factory: WeightFactory, site: int
) -> Attention | LatentAttention | MixerLayer:
    """Attention, or what the user has put in its place."""
    if shape.own_mixer is not None:
        return MixerLayer(shape, shape.own_mixer, factory)
    if shape.mla is not None:
        return LatentAttention(shape, shape.mla, factory, site)
    return Attention(shape, factory, site)
