"""The forward of a decoder, or of one stage of it, for the engine: a step in, logits out.

What is at the ends of a stage are `StageEnds`.

Legend: T tokens of a step, N tokens to be followed, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fivefold.core.model import BLOCK, blocks_of
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.cache import KvCache
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.routing import RouteStore
from fivefold.generate.stage_ends import StageEnds
from fivefold.generate.step_tensors import BlockTables, StepTensors, step_tensors
from fivefold.model import Decoder, TokenBatch, TokenRanks
from fivefold.model.kernels import by_operators

_MANY_TOKENS = 2048  # of a step: a GPU computes longer than the host calls
MakeCache = Callable[[Decoder, int], KvCache]
"""Of a decoder and a number of blocks."""


class DecoderForward:
    """Forward of a decoder or a stage, whose attention is replaced by one over pages."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: int,
        make_cache: MakeCache = KvCache,
        ends: StageEnds | None = None,
        routes: RouteStore | None = None,
        drawn: DrawnTokens | None = None,
        adapters: TokenRanks | None = None,
    ) -> None:
        """`drawn`: where the tokens are that the host does not know yet, if there are any.
        `adapters` are those of the decoder, if tokens have different ones."""
        self.decoder, self.ends, self.routes = decoder.eval(), ends or StageEnds(), routes
        self.drawn, self.adapters = drawn, adapters
        if adapters is not None:
            adapters.attach(decoder)
        self.padding = blocks  # the block that tokens without a sequence write to
        self.cache = make_cache(decoder, blocks + 1)
        self.device = next(decoder.parameters()).device
        longest = min(blocks_of(decoder.shape.max_seq), blocks)
        self.tables = BlockTables(self.device, longest, self.padding)
        self.states: Tensor | None = None  # of all tokens of the last step, for `mtp_drafts.py`

    @torch.inference_mode()
    def __call__(self, step: StepBatch) -> Tensor:
        self.copy_blocks(step)
        step = self._padded(step)
        if not step.chunks:
            return torch.empty(0, 0, device=self.device)
        with by_operators(step.num_tokens < _MANY_TOKENS):
            return self.run(step_tensors(step, self.tables))

    def copy_blocks(self, step: StepBatch) -> None:
        """Make the copies that a step begins with."""
        if step.copies:
            self.cache.copy_blocks(step.copies)
            if self.routes is not None:
                self.routes.copy_blocks(step.copies)

    def run(self, tensors: StepTensors) -> Tensor:
        """Logits of a step on the device, without synchronization; none before the last stage."""
        return self.hand_on(self.computed(tensors, self.received(tensors)))

    def received(self, tensors: StepTensors) -> Tensor | None:
        """Hidden states from the stage before, for the tokens of this rank."""
        if self.decoder.embed is not None:
            return None
        return self.ends.receive(self.ends.local_tokens(tensors.batch.tokens).numel())

    def computed(self, tensors: StepTensors, received_1TD: Tensor | None) -> Tensor:
        """Logits of a step, or the hidden states that the next stage receives."""
        x_TD = self.hidden(tensors, received_1TD)
        return x_TD if self.decoder.norm is None else self.logits(x_TD, tensors.sampled)

    def hand_on(self, output: Tensor) -> Tensor:
        """Send hidden states to the next stage, if there is one: then there are no logits."""
        if self.decoder.norm is not None:
            return output
        self.ends.send(output[None])
        return torch.empty(0, 0, device=self.device)

    def hidden(self, tensors: StepTensors, received_1TD: Tensor | None = None) -> Tensor:
        """Hidden states after the last block, for the tokens of this rank."""
        decoder, tokens_1T = self.decoder, tensors.batch.tokens
        if self.routes is not None:
            mine_1T = decoder.residual_tokens(self.ends.local_tokens(tensors.slots[None]))
            self.routes.begin(tensors.slots, mine_1T[0])
        batch = self._begin(
            tensors, tokens_1T if self.drawn is None else self.drawn.fill(tokens_1T)
        )
        x_1TD = received_1TD
        if decoder.embed is not None:
            x_1TD = decoder.embed(batch.tokens, batch)
        assert x_1TD is not None, "the first stage looks tokens up, the others receive"
        context = decoder.context(batch, x_1TD.dtype)
        return decoder.run_blocks(decoder.blocks.values(), x_1TD, context)[0]

    def _begin(self, tensors: StepTensors, tokens_1T: Tensor) -> TokenBatch:
        """Use a step in attention and adapters; the tokens of this rank, as a batch."""
        full_batch, local_rows = tensors.batch, self.ends.local_tokens
        assert full_batch.outgrown is not None
        self.cache.begin(tensors)
        if self.adapters is not None:
            self.adapters.begin(local_rows(tensors.adapters[None])[0])
        tokens, labels, positions, outgrown = map(
            local_rows, (tokens_1T, full_batch.labels, full_batch.positions, full_batch.outgrown)
        )
        return TokenBatch(tokens, labels, positions, outgrown=outgrown)

    def take_states(self) -> Tensor | None:
        """The hidden states of the last step, which are not held any longer."""
        states_TD, self.states = self.states, None
        return states_TD

    def run_ahead(
        self,
        depth: int,
        step: StepBatch,
        source_TD: Tensor,
        rows: Sequence[int],
        drawn: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """One depth of multi-token prediction: its hidden states, and the likeliest token at the
        end of each sequence that samples. A step's tokens have `rows` of the states of the depth
        before; they are tokens to come, some of which were `drawn` by the depths before."""
        decoder, step = self.decoder, self._padded(step)
        if not step.chunks:
            return source_TD[:0], torch.empty(0, dtype=torch.int64, device=self.device)
        padded_rows = [*rows, *[0] * (step.num_tokens - len(rows))]
        rows_T = torch.tensor(padded_rows, dtype=torch.int64).to(self.device)
        with by_operators(step.num_tokens < _MANY_TOKENS):
            tensors = step_tensors(step, self.tables)
            tokens_1T = tensors.batch.tokens
            if drawn:
                drawn_N = torch.cat([*drawn, tokens_1T[0, :1]])  # the last one for none
                known_1T = tokens_1T >= 0
                places_1T = (-1 - tokens_1T).masked_fill(known_1T, len(drawn_N) - 1)
                tokens_1T = torch.where(known_1T, tokens_1T, drawn_N[places_1T])
            batch = self._begin(tensors, tokens_1T)
            assert decoder.embed is not None and decoder.norm is not None
            states_TD = source_TD[rows_T] if depth else decoder.norm(source_TD[rows_T])
            states_1TD = decoder.residual_tokens(states_TD[None])
            token_1TD = decoder.embed(batch.tokens, batch)
            context = decoder.context(batch, token_1TD.dtype)
            layer = decoder.mtp[str(depth)]
            x_1TD = layer(states_1TD, token_1TD, context, decoder.run_blocks)
            x_TD = self.ends.all_tokens(x_1TD[0])
            return x_TD, self._scores(x_TD[tensors.sampled]).argmax(-1)

    def logits(self, x_TD: Tensor, sampled_N: Tensor) -> Tensor:
        """Logits of some tokens in the last stage."""
        x_TD = self.ends.all_tokens(x_TD)
        self.states = x_TD if len(self.decoder.mtp) else None
        assert self.decoder.norm is not None
        return self._scores(self.decoder.norm(x_TD[sampled_N]))

    def _scores(self, x_ND: Tensor) -> Tensor:
        """Logits of hidden states that are normed."""
        assert self.decoder.head is not None
        logits_NV = self.ends.all_logits(self.decoder.head.logits(x_ND))
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))

    def close(self) -> None:
        """Free what holds communicators: the groups end after this."""

    def _padded(self, step: StepBatch) -> StepBatch:
        """With tokens that belong to no sequence, up to a multiple of the unit. They are one more
        sequence to attention, and short: a block has room for them."""
        missing = -step.num_tokens % self.ends.unit
        if not step.chunks:
            missing = self.ends.unit if self.ends.idles_along else 0
        tables = -(-missing // BLOCK) * (self.padding,)
        none = SequenceChunk("", (0,) * missing, 0, tables, samples=False, fills=True)
        return replace(step, chunks=(*step.chunks, none)) if missing else step
