"""The leaves: linear, norm, rotary positions, MLP.

Each leaf hands its weights to one replaceable callable (`Linear.product`, `Norm.normalise`), so
that the arithmetic can be exchanged without touching names, shapes or the modules above.

Legend: B rows, S tokens, H heads, R half of a head's width, D model width, F MLP width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.shape import Activation, Rope, Shape

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Normalise = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


@dataclass(frozen=True)
class NormKind:
    """Of which type, and where, weights are made."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *sizes: int) -> nn.Parameter:
        """A weight without values."""
        return nn.Parameter(torch.empty(*sizes, dtype=self.dtype, device=self.device))


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Divide by the root of the mean square; the mean is taken in float32 or wider."""
    normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed if bias is None else normed + bias


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Subtract the mean and divide by the standard deviation."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class Linear(nn.Module):
    """A product with a weight of (outputs, inputs)."""

    def __init__(self, outputs: int, inputs: int, bias: bool, kind: NormKind) -> None:
        super().__init__()
        self.weight = kind.empty(outputs, inputs)
        self.bias = kind.empty(outputs) if bias else None
        self.product: Product = linear_product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class Norm(nn.Module):
    """RMSNorm or LayerNorm, as the shape says, over the last dim of its input."""

    def __init__(self, width: int, bias: bool, shape: Shape, kind: NormKind) -> None:
        super().__init__()
        self.weight = kind.empty(width)
        self.bias = kind.empty(width) if bias else None
        self.eps = shape.norm_eps
        self.normalise: Normalise = rms_norm if shape.norm == "rms" else layer_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.bias, self.eps)


class Mlp(nn.Module):
    """Up, activation (gated or not), down."""

    def __init__(self, shape: Shape, ffn: int, bias: bool, kind: NormKind) -> None:
        super().__init__()
        width = shape.width
        self.gate = Linear(ffn, width, bias, kind) if shape.gated else None
        self.up = Linear(ffn, width, bias, kind)
        self.down = Linear(width, ffn, bias, kind)
        self.activate = ACTIVATIONS[shape.activation]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activate(self.up(x_BSD)))
        return self.down(self.activate(self.gate(x_BSD)) * self.up(x_BSD))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


def rotary_tables(shape: Shape, positions_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles, (B, S, 1, R), in `dtype` (float32 or float64)."""
    frequencies_R = rotary_frequencies(shape, dtype, positions_BS.device)
    angles_BSR = positions_BS.to(dtype)[..., None] * frequencies_R
    angles_BS1R = angles_BSR[:, :, None, :]
    scale = 1.0 if shape.rope is None else _yarn_scale(shape.rope)
    return angles_BS1R.cos() * scale, angles_BS1R.sin() * scale


def rotary_frequencies(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle per position of each pair of a head, stretched as the shape's `rope` says."""
    width = shape.head_dim if shape.mla is None else shape.mla.rope_dim
    steps_R = torch.arange(0, width, 2, dtype=dtype, device=device)
    frequencies_R = 1.0 / shape.rope_theta ** (steps_R / width)
    if shape.rope is None:
        return frequencies_R
    if shape.rope.kind == "linear":
        return frequencies_R / shape.rope.factor
    if shape.rope.kind == "llama3":
        return _llama3_stretch(frequencies_R, shape.rope)
    return _yarn_stretch(frequencies_R, shape.rope, shape.rope_theta)


def _llama3_stretch(frequencies_R: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended linearly.

    Source: Llama 3.1's released code; the blend is linear in turns per original sequence.
    """
    turns_R = rope.original_seq * frequencies_R / (2 * math.pi)
    kept_R = (turns_R - rope.low_freq) / (rope.high_freq - rope.low_freq)
    kept_R = kept_R.clamp(0.0, 1.0)
    return (1 - kept_R) * frequencies_R / rope.factor + kept_R * frequencies_R


def _yarn_stretch(frequencies_R: Tensor, rope: Rope, theta: float) -> Tensor:
    """As llama3, but the blend is linear in the number of the pair, between whole pairs.

    Source: YaRN, arXiv:2309.00071, section 3.2, with its released code's rounding of the ends.
    """
    pairs = len(frequencies_R)

    def pair_that_turns(times: float) -> float:
        """The pair, as a fraction, that turns so often in an original sequence."""
        return pairs * math.log(rope.original_seq / (2 * math.pi * times)) / math.log(theta)

    first = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(rope.beta_slow)), 2 * pairs - 1)
    numbers_R = torch.arange(pairs, dtype=frequencies_R.dtype, device=frequencies_R.device)
    # A ramp of no length is a step behind its pair.
    stretched_R = ((numbers_R - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return stretched_R * frequencies_R / rope.factor + (1 - stretched_R) * frequencies_R


def _yarn_scale(rope: Rope) -> float:
    """What YaRN multiplies rotated queries and keys by; DeepSeek divides two such factors."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature of attention for positions that are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotate(x_BSHd: Tensor, rotary: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Turn each pair of a head by its token's angle, in the tables' precision.

    Pairs are (i, i + R), or (2i, 2i + 1) where they are interleaved; these leave as (i, i + R),
    which no product of a query with a key can tell.
    """
    cos_BS1R, sin_BS1R = rotary
    if interleaved:
        first, second = x_BSHd.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = x_BSHd.chunk(2, dim=-1)
    turned = (first * cos_BS1R - second * sin_BS1R, second * cos_BS1R + first * sin_BS1R)
    return torch.cat(turned, dim=-1).to(x_BSHd.dtype)
