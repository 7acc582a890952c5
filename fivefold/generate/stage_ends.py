"""What is at the ends of a pipeline stage of an engine: tokens in, hidden states on, logits out."""

from __future__ import annotations

from torch import Tensor


class StageEnds:
    """What is at the ends of a stage; here nothing, since one device has the whole model.

    The tokens of a forward are a multiple of `unit`. A replica that `idles_along` runs a forward
    without a sequence, because its experts serve those of others.
    """

    unit = 1
    idles_along = False

    def local_tokens(self, of_tokens_1T: Tensor) -> Tensor:
        """Of the tokens of a step, those that this rank computes."""
        return of_tokens_1T

    def receive(self, num_tokens: int) -> Tensor:
        """The hidden states of the stage before, of so many tokens."""
        raise AssertionError("the first stage looks tokens up")

    def send(self, x_1TD: Tensor) -> None:
        """Pass hidden states on to the stage after."""

    def all_tokens(self, x_TD: Tensor) -> Tensor:
        """The hidden states of all tokens, where a rank has some."""
        return x_TD

    def all_logits(self, logits_NV: Tensor) -> Tensor:
        """The logits of the full vocabulary, where a rank has some."""
        return logits_NV
