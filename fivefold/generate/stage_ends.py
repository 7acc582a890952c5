"""What is at the ends of a pipeline stage of an engine: tokens in, hidden states on, logits out."""

from __future__ import annotations

from torch import Tensor


class StageEnds:
    """Inputs and outputs of a stage; identities here, since one device has the full model.

    The tokens of a forward are a multiple of `unit`. A replica that `idles_along` runs a forward
    without a sequence, because its experts serve those of others.
    """

    unit = 1
    idles_along = False

    def local_tokens(self, of_tokens_1T: Tensor) -> Tensor:
        """Select the tokens of a step that this rank computes."""
        return of_tokens_1T

    def receive(self, num_tokens: int) -> Tensor:
        """Receive hidden states from the previous stage."""
        raise AssertionError("the first stage looks tokens up")

    def send(self, x_1TD: Tensor) -> None:
        """Send hidden states to the next stage."""

    def all_tokens(self, x_TD: Tensor) -> Tensor:
        """Gather hidden states of all tokens."""
        return x_TD

    def all_logits(self, logits_NV: Tensor) -> Tensor:
        """Gather logits of the full vocabulary."""
        return logits_NV
