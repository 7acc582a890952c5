"""A decoder with weights, to generate from: read one at a time, whatever they are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fivefold.core.shape import Shape
from fivefold.core.weights import Weight, buffers, weights
from fivefold.generate.blocks import BLOCK
from fivefold.generate.cache import token_bytes
from fivefold.model.decoder import Decoder, from_config

ReadWeight = Callable[[Weight, torch.dtype], Tensor]


def load_decoder(shape: Shape, dtype: torch.dtype, read: ReadWeight) -> Decoder:
    """The decoder without layers of multi-token prediction, which only training uses."""
    shape = replace(shape, mtp=0)
    decoder = from_config(shape, dtype=dtype)
    tensors = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
    with torch.no_grad():
        for each in (*weights(shape), *buffers(shape)):
            tensor = tensors[each.name]
            tensor.copy_(read(each, tensor.dtype))
    return decoder


def blocks_within(decoder: Decoder, num_bytes: float) -> int:
    """The blocks of a cache of so many bytes."""
    return int(num_bytes // (token_bytes(decoder) * BLOCK))
