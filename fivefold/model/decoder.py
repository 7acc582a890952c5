"""The decoder: embedding, blocks, final norm, head, and multi-token prediction.

A decoder may be one pipeline stage, with some of the blocks. Parameter names are global, those of
`core/layout/weight_table.py`: a stage with blocks 4 to 7 has `blocks.4.attention.q.weight`. A new
decoder has no values; `model/init.py` fills it.

Seams are attributes that `fivefold/parallel` and `model/recompute.py` replace by others of the same
signature, so that this package knows nothing of parallelism: `Linear.matmul`, `Attention.project`,
`Mlp.project`, `Mlp.activate`, `Norm.normalise`, `ResidualNorm.normalise_sum`, `Attention.kernel`,
`Embedding.lookup`, `Embedding.add_positions`, `Head.matmul`, `Head.cross_entropy`, `Head.chunked`,
`Block.repeats`, `Attention.first_head`, `Attention.hold`, `MixerLayer.kernel`, `MixerLayer.hold`,
`Decoder.residual_tokens`, `Decoder.run_blocks`, and in `model/moe.py` `Router.matmul`,
`Router.hold`, `ExpertStack.matmul`, `ExpertStack.add_bias`, `MoeMlp.balance` and `MoeMlp.dispatch`.

Legend: B rows, S tokens, N = B·S, D model width, V vocabulary, P learned positions.

One layer of the decoder: attention and MLP or experts, with their norms and the residual.

Its seam, `Block.repeats`, is one of those that `model/decoder.py` lists.

Legend: B rows, S tokens, D model width, K choices of experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.core.layout import by_name, weights
from fivefold.core.model import Module, Shape
from fivefold.model.attention import Attention, LatentAttention
from fivefold.model.batch import AttentionInfo, Context, TokenBatch, mark_outgrown, seen_documents
from fivefold.model.dropout import (
    EMBEDDING,
    PARTS,
    PairDropout,
    Part,
    SiteKeys,
    dropping,
    site_keys,
    site_of,
)
from fivefold.model.head import Head
from fivefold.model.kernels import Fuse, eager
from fivefold.model.layers import (
    Linear,
    Mlp,
    Norm,
    ResidualNorm,
    WeightFactory,
    local_shape,
    rotary_tables,
    temperature,
)
from fivefold.model.mixer_layer import MixerLayer
from fivefold.model.moe import ExpertStack, MoeMlp
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


Lookup = Callable[[Tensor, Tensor], Tensor]
AddPositions = Callable[[Tensor, Tensor, Tensor], Tensor]
OfTokens = Callable[[Tensor], Tensor]
RunBlocks = Callable[[Iterable[nn.Module], Tensor, Context], Tensor]

# DeepSeek-V3 (arXiv:2412.19437, section 4.2) weighs the mean loss of all depths of multi-token
# prediction with this for its first 10T tokens, and with 0.1 after that.
MTP_LOSS_WEIGHT = 0.3


def embedding_lookup(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """The row of each token."""
    return F.embedding(tokens_BS, weight_VD)


def add_positions(x_BSD: Tensor, positions_BS: Tensor, weight_PD: Tensor) -> Tensor:
    """Add the row of each token's position."""
    return x_BSD + F.embedding(positions_BS, weight_PD)


class Embedding(nn.Module):
    """Tokens to vectors, plus learned positions where the model has them."""

    def __init__(
        self,
        weight_VD: nn.Parameter,
        positions_PD: nn.Parameter | None = None,
        scaled: bool = False,
    ) -> None:
        """`scaled`: times the root of the width, which is rounded as weights are."""
        super().__init__()
        self.weight, self.positions = weight_VD, positions_PD
        root = torch.tensor(weight_VD.shape[1] ** 0.5, dtype=weight_VD.dtype, device="cpu")
        self.scale = root.item() if scaled else 1.0
        # Seams: sharded vocabulary, sequence parallelism, split backward.
        self.lookup: Lookup = embedding_lookup
        self.add_positions: AddPositions = add_positions

    def forward(self, tokens_BS: Tensor, batch: TokenBatch) -> Tensor:
        x_BSD = self.lookup(tokens_BS, self.weight)
        x_BSD = x_BSD if self.scale == 1 else x_BSD * self.scale
        if self.positions is None:
            return x_BSD
        return self.add_positions(x_BSD, batch.positions, self.positions)


class MtpLayer(nn.Module):
    """One depth of multi-token prediction, as in DeepSeek-V3 (arXiv:2412.19437, section 2.2).

    Depth j joins the hidden state of the depth before with the embedding of the token j positions
    ahead, and predicts the token after that. Embedding and head are those of the model. The order
    of the join, token first, and the norm before the head are those of the published weights
    (`eh_proj`, `shared_head.norm`).
    """

    def __init__(self, shape: Shape, block: nn.Module, factory: WeightFactory) -> None:
        super().__init__()
        self.token_norm = Norm(shape.width, shape.norm_bias, shape, factory)
        self.hidden_norm = Norm(shape.width, shape.norm_bias, shape, factory)
        self.join = Linear(shape.width, 2 * shape.width, False, factory)
        self.block = block
        self.norm = Norm(shape.width, shape.norm_bias, shape, factory)

    def forward(
        self, hidden_BSD: Tensor, token_BSD: Tensor, context: Context, run_blocks: RunBlocks
    ) -> Tensor:
        """The input of the head at this depth; `run_blocks` runs the block."""
        pair = torch.cat([self.token_norm(token_BSD), self.hidden_norm(hidden_BSD)], dim=-1)
        return self.norm(run_blocks([self.block], self.join(pair), context))


def all_tokens(of_tokens_BS: Tensor) -> Tensor:
    """The tokens of the residual stream: all."""
    return of_tokens_BS


def run_blocks(blocks: Iterable[nn.Module], x_BSD: Tensor, context: Context) -> Tensor:
    """The forward of several blocks, one after another."""
    for block in blocks:
        x_BSD = block(x_BSD, context)
    return x_BSD


class Decoder(nn.Module):
    """The model, or one pipeline stage of it with the blocks `layers`.

    It drops activations in training, if the batch has keys for that.
    """

    def __init__(self, shape: Shape, factory: WeightFactory, layers: range) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == shape.layers
        self.shape, self.layers = shape, layers
        self.drop, self.site_keys = dropping(factory.fuse), factory.fuse(site_keys)
        scaled, cap = shape.scaled_embedding, shape.logit_cap
        self.embed = Embedding(*self._embedding_weights(factory), scaled) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(shape, i, factory) for i in layers})
        self.norm = Norm(shape.width, shape.norm_bias, shape, factory) if last else None
        self.head = Head(self._head_weight(factory), factory.fuse, cap) if last else None
        self.mtp = nn.ModuleDict(self._mtp_layers(factory) if last else {})
        self.residual_tokens: OfTokens = all_tokens  # seam: sequence parallelism
        self.run_blocks: RunBlocks = run_blocks  # seam: full recomputation

    @property
    def dtype(self) -> torch.dtype:
        """That of activations, and of weights that are not codes in fp8."""
        return next(weight.dtype for weight in self.parameters() if weight.element_size() > 1)

    def forward(self, inputs: Tensor, batch: TokenBatch) -> Tensor:
        """The hidden states of the last block, or the sum of the token losses with a head.

        `inputs` are token ids (B, S) with an embedding, else hidden states of the stage before. In
        training, the weighted losses of multi-token prediction are added to the sum.
        """
        x_BSD = inputs if self.embed is None else self._embedded(self.embed, inputs, batch)
        context = self.context(batch, x_BSD.dtype)
        rate = self.shape.embedding_rate
        if self.embed is not None and context.sites is not None and rate:
            x_BSD = self.drop(x_BSD, context.sites.of(EMBEDDING), rate)
        x_BSD = self.run_blocks(self.blocks.values(), x_BSD, context)
        if self.norm is None or self.head is None:
            return x_BSD
        x_BSD = self.norm(x_BSD)
        loss = self.head(x_BSD, batch.labels)
        if not self.training or not self.shape.mtp:
            return loss
        return loss + self._mtp_loss(x_BSD, batch, context)

    def _embedded(self, embed: Embedding, tokens_BS: Tensor, batch: TokenBatch) -> Tensor:
        """The input of the first block. Backwards come to it, whatever learns: so every layer has
        the same backward."""
        x_BSD = embed(tokens_BS, batch)
        goes_back = torch.is_grad_enabled() and not x_BSD.requires_grad
        return x_BSD.requires_grad_() if goes_back else x_BSD

    def _mtp_loss(self, x_BSD: Tensor, batch: TokenBatch, context: Context) -> Tensor:
        """The mean over the depths of the summed losses, times its weight."""
        assert len(batch.ahead) == self.shape.mtp, "give the batch of look_ahead"
        assert self.head is not None
        embed = self.mtp["embed"] if self.embed is None else self.embed
        losses: list[Tensor] = []
        for j, (tokens_BS, labels_BS) in enumerate(batch.ahead):
            token_BSD = embed(tokens_BS, batch)
            x_BSD = self.mtp[str(j)](x_BSD, token_BSD, context, self.run_blocks)
            losses.append(self.head(x_BSD, labels_BS))
        return torch.stack(losses).mean() * MTP_LOSS_WEIGHT

    def num_uses(self) -> dict[str, int]:
        """How often a forward uses each weight of embedding and head; it uses all others once.

        Every depth of multi-token prediction uses both again.
        """
        depths = self.shape.mtp if self.head is not None else 0
        uses: Counter[int] = Counter()
        for module in (self.embed, self.head):
            uses.update(
                {id(parameter): 1 + depths for parameter in module.parameters()} if module else {}
            )
        for module in (mtp_module for name, mtp_module in self.mtp.items() if name == "embed"):
            uses.update({id(parameter): depths for parameter in module.parameters()})
        named = {name: uses[id(parameter)] for name, parameter in self.named_parameters()}
        return {name: count for name, count in named.items() if count}

    def all_blocks(self) -> list[Block]:
        """Every block in forward order, with those of multi-token prediction."""
        return [module for module in self.modules() if isinstance(module, Block)]

    def context(self, batch: TokenBatch, dtype: torch.dtype) -> Context:
        """The context of all blocks, for hidden states of `dtype`."""
        shape, rotary = self.shape, None
        batch = mark_outgrown(batch, shape)
        wide = torch.promote_types(dtype, torch.float32)
        chunked = shape.window_kind == "chunked"
        window, chunk = (None, shape.window) if chunked else (shape.window, None)
        documents = seen_documents(batch, shape.window, chunked)
        pairs, sites = self._dropout(batch)
        extra = (window, pairs, batch.row, shape.score_cap, chunk)
        if shape.positions == "rotary":
            rotary = rotary_tables(local_shape(shape), batch.positions, wide, batch.outgrown)
        replayed = None if batch.replayed is None else self.residual_tokens(batch.replayed)
        info = AttentionInfo(batch.positions, documents, *extra)
        context = Context(info, rotary, sites, replayed)
        if shape.global_every is None:
            return context
        tables = rotary if shape.global_rotary else None
        if shape.local_theta is not None:
            tables = rotary_tables(shape, batch.positions, wide, batch.outgrown)
        heat = None
        if shape.nope_floor is not None:
            heat = temperature(batch.positions, shape.nope_floor, shape.nope_scale, wide)
        info = replace(info, documents=seen_documents(batch, None), window=None, chunk=None)
        beyond = replace(context, attention=info, rotary=tables, temperature=heat)
        return replace(context, beyond=beyond)

    def _dropout(self, batch: TokenBatch) -> tuple[PairDropout | None, SiteKeys | None]:
        """What draws the pairs of attention and the features that are dropped."""
        keys, pairs, sites = batch.keys, None, None
        if keys is None or not self.training:
            return None, None
        if self.shape.attention_dropout:
            row = keys if batch.row is None or batch.row.keys is None else batch.row.keys
            pairs = PairDropout(self.shape.attention_dropout, row)
        used = [] if self.embed is None else [EMBEDDING]
        used += [site_of(block.number, part) for block in self.all_blocks() for part in PARTS]
        if (self.shape.dropout or self.shape.embedding_rate) and used:
            mine_BS = self.residual_tokens(keys)
            sites = SiteKeys(used[0], self.site_keys(mine_BS, used[0], used[-1] + 1))
        return pairs, sites

    def _embedding_weights(
        self, factory: WeightFactory
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        shape = self.shape
        learned = shape.positions == "learned"
        positions = factory.empty(shape.max_seq, shape.width) if learned else None
        return factory.empty(shape.vocab, shape.width), positions

    def _mtp_layers(self, factory: WeightFactory) -> dict[str, nn.Module]:
        """The layers of multi-token prediction, and an embedding where this stage has no other."""
        shape, layers = self.shape, dict[str, nn.Module]()
        for j in range(shape.mtp):
            layers[str(j)] = MtpLayer(shape, Block(shape, shape.layers + j, factory), factory)
        if shape.mtp and self.embed is None:
            assert self.head is not None
            weight = self.head.weight if shape.tied else factory.empty(shape.vocab, shape.width)
            layers["embed"] = Embedding(weight, scaled=shape.scaled_embedding)
        return layers

    def _head_weight(self, factory: WeightFactory) -> nn.Parameter:
        if self.shape.tied and self.embed is not None:
            return self.embed.weight
        return factory.empty(self.shape.vocab, self.shape.width)


def from_config(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layers: range | None = None,
    fuse: Fuse = eager,
) -> Decoder:
    """A decoder without values, or the stage with these blocks; `fuse` makes its kernels.

    The stage of the first block has the embedding, that of the last one the head.
    """
    weights(shape)  # refuses a shape that cannot be built
    layers = range(shape.layers) if layers is None else layers
    assert layers.step == 1 and 0 <= layers.start <= layers.stop <= shape.layers, layers
    factory = WeightFactory(dtype, torch.device(device), fuse)
    decoder = Decoder(shape, factory, layers)
    if shape.tuning is not None:
        # Add adapters, and freeze what does not learn.
        for name, module in list(decoder.named_modules()):
            if isinstance(module, (Linear, ExpertStack)) and shape.tuning.adapts(f"{name}.weight"):
                module.adapt(shape.tuning.rank, shape.tuning.scale, factory)
        table = by_name(decoder.shape)
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(not table[name].frozen)
    return decoder
