"""Initial values: each weight is a pure function of the seed and its global name.

Every rank of every layout makes its shards without communication, and all layouts start from the
same model. (On the same kind of device: CPU and CUDA draw different numbers.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from fivefold.core.layout import Weight, by_name
from fivefold.core.model import ADAPTER, Shape
from fivefold.model.decoder import Decoder

STANDARD_DEVIATION = 0.02  # that of GPT-2
INTO_RESIDUAL = (".attention.out.weight", ".down.weight")  # of attention, MLPs and experts


def initial_weight(
    weight: Weight,
    shape: Shape,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    experts: range | None = None,
) -> Tensor:
    """The full weight: normal(0, 0.02), norms 1, biases 0, or as its table says; of stacked experts
    only `experts`.

    The standard deviation of projections into the residual is divided by √(2·layers), so that the
    variance of the residual does not grow with depth. Each expert is drawn by itself: all experts
    of a layer may not fit into the memory of a rank. The second factor of an adapter is 0, so that
    it changes nothing at first; the first has the deviation that PEFT draws it with, √(1/3) of
    1/√inputs.
    """
    if weight.role == "bias" or weight.name.endswith(f"{ADAPTER}b"):
        count = weight.shape[0] if experts is None else len(experts)
        sizes = (count, *weight.shape[1:]) if weight.expert else weight.shape
        return torch.zeros(sizes, dtype=dtype, device=device)
    if weight.first is not None:
        rows = torch.linspace(*weight.first, weight.shape[0], dtype=torch.float64, device=device)
        rows = rows.reshape(-1, *(1 for _ in weight.shape[1:])).expand(weight.shape)
        return rows.to(dtype, copy=True)
    if weight.role == "norm":
        ones = torch.ones(weight.shape, dtype=dtype, device=device)
        return ones.zero_() if shape.norm == "rms_offset" else ones
    deviation = STANDARD_DEVIATION
    if weight.name.endswith(INTO_RESIDUAL):
        deviation /= (2 * shape.layers) ** 0.5
    if ADAPTER in weight.name:
        deviation = (3 * weight.shape[-1]) ** -0.5
    if not weight.expert:
        return _draw(weight.name, weight.shape, deviation, seed, dtype, device)
    drawn = range(weight.shape[0]) if experts is None else experts
    stacked = torch.empty((len(drawn), *weight.shape[1:]), dtype=dtype, device=device)
    for index, expert in enumerate(drawn):
        name = f"{weight.name}:{expert}"
        stacked[index] = _draw(name, weight.shape[1:], deviation, seed, dtype, device)
    return stacked


def _draw(
    name: str,
    size: tuple[int, ...],
    deviation: float,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Draw in float32 and round, so that a bfloat16 model is the rounded float32 model."""
    wide = torch.empty(size, dtype=torch.promote_types(dtype, torch.float32), device=device)
    if wide.is_meta:  # there is nothing to draw
        return wide.to(dtype)
    generator = torch.Generator(device).manual_seed(_seed_of(name, seed))
    return wide.normal_(0.0, deviation, generator=generator).to(dtype)


def init_weights(
    decoder: Decoder, shape: Shape, seed: int, draw: Callable[..., Tensor] = initial_weight
) -> None:
    """Fill all full weights of a decoder or of one stage; buffers become zero."""
    table = by_name(shape)
    with torch.no_grad():
        for buffer in decoder.buffers():
            buffer.zero_()
        for name, parameter in decoder.named_parameters():
            parameter.copy_(draw(table[name], shape, seed, parameter.dtype, parameter.device))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes seeds below 2**63
