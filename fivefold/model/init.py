"""Initial values: each weight a pure function of the seed and its global name.

Every rank of every layout can so make its piece without asking another, and all layouts start
from the same model. (On the same kind of device: CPU and CUDA draw different numbers.)
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fivefold.core.shape import Shape
from fivefold.core.weights import Weight, by_name
from fivefold.model.decoder import Decoder

SPREAD = 0.02  # standard deviation, that of GPT-2
RESIDUAL = (".attention.out.weight", ".down.weight")  # of MLPs and of experts


def initial(
    weight: Weight,
    shape: Shape,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    experts: range | None = None,
) -> Tensor:
    """The whole weight: normal(0, 0.02), norms 1, biases 0; of stacked experts, only these.

    Projections into the residual are 1/√(2·layers) as wide, so that the residual's variance does
    not grow with depth. Every expert is drawn by itself: all of a layer may be more than a rank
    has room for.
    """
    if weight.name.endswith(".bias"):
        return torch.zeros(weight.shape, dtype=dtype, device=device)
    if len(weight.shape) == 1:
        return torch.ones(weight.shape, dtype=dtype, device=device)
    spread = SPREAD
    if weight.name.endswith(RESIDUAL):
        spread /= (2 * shape.layers) ** 0.5
    if weight.expert_dim is None:
        return _drawn(weight.name, weight.shape, spread, seed, dtype, device)
    held = range(weight.shape[0]) if experts is None else experts
    stacked = torch.empty((len(held), *weight.shape[1:]), dtype=dtype, device=device)
    for place, expert in enumerate(held):
        name = f"{weight.name}:{expert}"
        stacked[place] = _drawn(name, weight.shape[1:], spread, seed, dtype, device)
    return stacked


def _drawn(
    name: str,
    size: tuple[int, ...],
    spread: float,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Drawn in float32 and rounded, so that a bfloat16 model is the float32 one, rounded."""
    wide = torch.empty(size, dtype=torch.promote_types(dtype, torch.float32), device=device)
    generator = torch.Generator(device).manual_seed(_seed_of(name, seed))
    return wide.normal_(0.0, spread, generator=generator).to(dtype)


def init_weights(decoder: Decoder, shape: Shape, seed: int) -> None:
    """Fill every parameter of a plain decoder, or of a slice of one; buffers are zero."""
    table = by_name(shape)
    with torch.no_grad():
        for buffer in decoder.buffers():
            buffer.zero_()
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initial(table[name], shape, seed, parameter.dtype, parameter.device))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch wants it below 2**63
