"""The basic layers: linear, norm, MLP, rotary positions.

`Linear.matmul`, `Mlp.project`, `Norm.normalise` and `ResidualNorm.normalise_sum` are seams:
attributes with the arithmetic of a layer, which `fivefold/parallel` replaces by functions of the
same signature. Weights and their names stay. What is neither a GEMM nor attention is a region
(`model/kernels/regions.py`).

Legend: B rows, S tokens, H heads, R half of a head's width, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.model import Activation, Rope, Shape
from fivefold.model.kernels import Compute, Fuse, Region, ResidualRegion, eager
from fivefold.model.low_rank import LowRank, adapted_linear
from fivefold.model.remake import remade, saving
from fivefold.model.slots import weigh_rows

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Normalise = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
NormaliseSum = Callable[
    [Tensor, Tensor | None, Tensor, Tensor | None, float], tuple[Tensor, Tensor]
]


@dataclass(frozen=True)
class WeightFactory:
    """Makes weights of one dtype on one device, and kernels."""

    dtype: torch.dtype
    device: torch.device
    fuse: Fuse = eager

    def empty(self, *sizes: int) -> nn.Parameter:
        """An uninitialised weight."""
        return nn.Parameter(torch.empty(*sizes, dtype=self.dtype, device=self.device))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Divide by the root of the mean square; the mean is taken in float32 or wider."""
    normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed if bias is None else normed + bias


def offset_rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The same, of a weight that is stored less 1; it is added in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) + 1
    return rms_norm(x.to(wide), scale, bias, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Subtract the mean and divide by the standard deviation."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _rms_by_hand(compiler: Compute) -> Compute:
    """The gradients of a root-mean-square norm: by our kernel on a GPU, else by the compiler's."""

    def gradients(
        needs: Sequence[bool], inputs: Sequence[Any], gradient: Tensor, residual: Tensor
    ) -> Sequence[Tensor]:
        if gradient.is_cuda:
            from fivefold.model.kernels import norm_kernel  # Triton is there only with CUDA

            if norm_kernel.takes(inputs, needs, gradient):
                return norm_kernel.rms_gradients(inputs, gradient, residual)
        return compiler(needs, inputs, gradient, residual)

    return gradients


NORMS = {
    "rms": ResidualRegion(rms_norm, _rms_by_hand),
    "rms_offset": ResidualRegion(offset_rms_norm),
    "layer": ResidualRegion(layer_norm),
}


class Linear(nn.Module):
    """A matmul with a weight of (outputs, inputs), and a bias."""

    def __init__(self, outputs: int, inputs: int, bias: bool, factory: WeightFactory) -> None:
        super().__init__()
        self.weight = factory.empty(outputs, inputs)
        self.bias = factory.empty(outputs) if bias else None
        self.lora: LowRank | None = None
        self.row_scale: Tensor | None = None  # (outputs, 1), of a weight that is codes in fp8
        self.matmul: Matmul = linear  # seam: tensor parallelism, split backward

    def adapt(self, rank: int, scale: float, factory: WeightFactory) -> None:
        """Add a low-rank adapter."""
        outputs, inputs = self.weight.shape
        self.lora = LowRank(factory.empty(rank, inputs), factory.empty(outputs, rank), scale)
        self.matmul = partial(adapted_linear, self.lora)

    def scale_rows(self, row_scale: Tensor) -> None:
        """The weight is codes, with these scales."""
        self.row_scale = row_scale

    def forward(self, x: Tensor) -> Tensor:
        with saving(x):
            return self.matmul(x, self.weight, self.bias)


Hold = Callable[[Tensor], Tensor]


def as_it_is(weight: Tensor) -> Tensor:
    """A weight that is used by itself, whose gradient autograd delivers."""
    return weight


Project = Callable[[Tensor, Sequence[Linear]], Sequence[Tensor]]


def project(x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """The outputs of several linears that read one input."""
    return [linear(x) for linear in linears]


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim of its input, as the shape asks for.

    `eps` is that of the shape where none is given.
    """

    def __init__(
        self, width: int, bias: bool, shape: Shape, factory: WeightFactory, eps: float | None = None
    ) -> None:
        super().__init__()
        self.weight = factory.empty(width)
        self.bias = factory.empty(width) if bias else None
        self.eps = shape.norm_eps if eps is None else eps
        self.kind, self.remakes = shape.norm, False  # seam: recomputation
        self.normalise: Normalise = NORMS[shape.norm].by(factory.fuse)  # seam: split backward

    def forward(self, x: Tensor) -> Tensor:
        return self._remade(self.normalise(x, self.weight, self.bias, self.eps), x)

    def _remade(self, normed: Tensor, x: Tensor) -> Tensor:
        if not self.remakes:
            return normed
        same = (x.detach(), self.weight, self.bias, self.eps)
        return remade(normed, partial(self.normalise, *same))


class ResidualNorm(Norm):
    """A norm of the residual stream, and the sum before it, if `y` is given: returns the normed sum
    and the sum. Who goes on with that sum has its gradient added in the backward of the norm."""

    def __init__(self, shape: Shape, factory: WeightFactory) -> None:
        super().__init__(shape.width, shape.norm_bias, shape, factory)
        # seam: as above
        self.normalise_sum: NormaliseSum = NORMS[shape.norm].after_sum(factory.fuse)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        normed, total = self.normalise_sum(x, y, self.weight, self.bias, self.eps)
        return self._remade(normed, total), total


class Mlp(nn.Module):
    """Up projection, activation (gated or not), down projection."""

    def __init__(self, shape: Shape, ffn: int, bias: bool, factory: WeightFactory) -> None:
        super().__init__()
        width = shape.width
        self.gate = Linear(ffn, width, bias, factory) if shape.gated else None
        self.up = Linear(ffn, width, bias, factory)
        self.down = Linear(width, ffn, bias, factory)
        self.activate = Activate(shape, factory.fuse)  # seam: generation
        self.project: Project = project  # seam: tensor parallelism, split backward

    def forward(self, x_BSD: Tensor) -> Tensor:
        # Between its projections, tokens may be in another order.
        return self.down(self._activated(x_BSD)).view_as(x_BSD)

    def _activated(self, x_BSD: Tensor) -> Tensor:
        linears = [self.up] if self.gate is None else [self.gate, self.up]
        *gate, up = self.project(x_BSD, linears)
        return self.activate(gate[0] if gate else None, up)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


CLAMP, STEEPER = 7.0, 1.702  # of gpt-oss


def _clamped_gate(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(STEEPER * gate)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "swiglu_clamped": _clamped_gate,
    "geglu": F.gelu,
    "geglu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


@cache
def _activation(name: Activation, gated: bool, varies: bool) -> Region:
    activate = ACTIVATIONS[name]

    def activated(up: Tensor, weight: Tensor | None = None) -> Tensor:
        return weigh_rows(activate(up), weight)

    def times_up(gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
        up = (up.clamp(-CLAMP, CLAMP) + 1) if name == "swiglu_clamped" else up
        return weigh_rows(activate(gate) * up, weight)

    return Region(times_up if gated else activated, varies=varies)


class Activate:
    """The activation of an MLP, times the up projection if there is a gate, and times the weight of
    each row if there is one. `varies`: of experts, whose tokens are as many as the router sends."""

    def __init__(self, shape: Shape, fuse: Fuse, varies: bool = False) -> None:
        self.remakes = False  # seam: recomputation
        self.run = _activation(shape.activation, shape.gated, varies).by(fuse)

    def __call__(self, gate: Tensor | None, up: Tensor, weight: Tensor | None = None) -> Tensor:
        inputs = tuple(tensor for tensor in (gate, up, weight) if tensor is not None)
        activated = self.run(*inputs)
        if not self.remakes:
            return activated
        return remade(activated, partial(self.run, *(tensor.detach() for tensor in inputs)))


def rotary_tables(
    shape: Shape, positions_BS: Tensor, dtype: torch.dtype, outgrown_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles, (B, S, 1, R), in `dtype` (float32 or float64): of layers
    without a window, if others have a base of their own (`local_shape`). `outgrown_BS` is that of
    a `TokenBatch`, where the shape has two rotations."""
    frequencies = rotary_frequencies(shape, dtype, positions_BS.device)
    if shape.rope is not None and shape.rope.kind == "longrope":
        assert outgrown_BS is not None, "give a batch that was marked"
        divisors_2R = _longrope_divisors(shape.rope, dtype, positions_BS.device)
        frequencies = (frequencies / divisors_2R)[outgrown_BS]  # (B, S, R)
    angles_BSR = positions_BS.to(dtype)[..., None] * frequencies
    angles_BS1R = angles_BSR[:, :, None, :]
    scale = 1.0 if shape.rope is None else shape.rope.scale
    return angles_BS1R.cos() * scale, angles_BS1R.sin() * scale


def temperature(positions_BS: Tensor, floor: int, scale: float, dtype: torch.dtype) -> Tensor:
    """What multiplies queries without positions, (B, S, 1, 1): more, the further they are."""
    steps_BS = ((positions_BS + 1) // floor).to(dtype)
    return (steps_BS.log1p() * scale + 1)[:, :, None, None]


def local_shape(shape: Shape) -> Shape:
    """The same, whose rotary tables are those of layers with a window."""
    if shape.local_theta is None:
        return shape
    return replace(shape, rope_theta=shape.local_theta, rope=None)


def rotary_frequencies(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Angle per position of each pair of a head, scaled as the shape's `rope` asks for; by longrope
    not yet."""
    width = shape.rotated_dim
    steps_R = torch.arange(0, width, 2, dtype=dtype, device=device)
    frequencies_R = 1.0 / shape.rope_theta ** (steps_R / width)
    if shape.rope is None or shape.rope.kind == "longrope":
        return frequencies_R
    if shape.rope.kind == "linear":
        return frequencies_R / shape.rope.factor
    if shape.rope.kind == "llama3":
        # Divides low frequencies by `factor`, keeps high ones, and blends linearly in between.
        turns_R = shape.rope.original_seq * frequencies_R / (2 * math.pi)
        unscaled_R = (turns_R - shape.rope.low_freq) / (shape.rope.high_freq - shape.rope.low_freq)
        unscaled_R = unscaled_R.clamp(0.0, 1.0)
        return (1 - unscaled_R) * frequencies_R / shape.rope.factor + unscaled_R * frequencies_R
    return _yarn_scaling(frequencies_R, shape.rope, shape.rope_theta)


@cache
def _longrope_divisors(rope: Rope, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(2, R): of texts up to the original length, and of longer ones.

    Source: LongRoPE, arXiv:2402.13753, as in `transformers`. Cached: no captured step may copy
    numbers from the host.
    """
    with torch.inference_mode(False):
        return torch.tensor([rope.short, rope.long], dtype=dtype, device=device)


def _yarn_scaling(frequencies_R: Tensor, rope: Rope, theta: float) -> Tensor:
    """As llama3, but the blend is linear in the index of the pair, between two integers.

    Source: YaRN, arXiv:2309.00071, section 3.2, with its released code's rounding of the ends.
    """
    pairs = len(frequencies_R)

    def pair_index(turns: float) -> float:
        """The pair, as a fractional index, that makes so many turns in an original sequence."""
        return pairs * math.log(rope.original_seq / (2 * math.pi * turns)) / math.log(theta)

    first, last = pair_index(rope.beta_fast), pair_index(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    indices_R = torch.arange(pairs, dtype=frequencies_R.dtype, device=frequencies_R.device)
    # A ramp of length 0 is a step after its pair.
    scaled_R = ((indices_R - first) / ((last - first) or 1e-3)).clamp(0.0, 1.0)
    return scaled_R * frequencies_R / rope.factor + (1 - scaled_R) * frequencies_R


def rotate(x_BSHd: Tensor, cos_BS1R: Tensor, sin_BS1R: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair of a head by its token's angle, in the precision of the tables.

    Pairs are (i, i + R), or (2i, 2i + 1) where they are interleaved. Interleaved pairs come out as
    (i, i + R): the dot product of a query and a key does not depend on that order. Dims of a head
    after 2R stay as they are.
    """
    tail = x_BSHd[..., 2 * cos_BS1R.shape[-1] :]
    turned = x_BSHd[..., : 2 * cos_BS1R.shape[-1]]
    if interleaved:
        first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    rotated = (first * cos_BS1R - second * sin_BS1R, second * cos_BS1R + first * sin_BS1R)
    return torch.cat([*rotated, tail] if tail.shape[-1] else rotated, dim=-1).to(x_BSHd.dtype)


ROTATE = Region(rotate, linear=True)


def l2_norm(x_BSHd: Tensor, eps: float) -> Tensor:
    """Each head divided by the root of its mean square; there is no weight."""
    return F.rms_norm(x_BSHd, x_BSHd.shape[-1:], eps=eps)


L2 = Region(l2_norm)
