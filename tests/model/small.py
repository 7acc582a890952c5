"""Small shapes, filled decoders and batches for the model's tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fivefold.core.errors import BadFile
from fivefold.core.layout.weight_table import buffers, weights
from fivefold.core.model.shape import Mla, Moe, Rope, Shape
from fivefold.huggingface.names import (
    hf_tensors,
    mismatches,
    names_in_files,
    published_copies,
    tensor_to_hf,
    weight_from_hf,
)
from fivefold.model.batch import TokenBatch, look_ahead
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.documents import Documents
from fivefold.model.init import init_weights

LLAMA = Shape(
    name="small-llama",
    layers=4,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=40,
    vocab=67,
    max_seq=64,
)
GPT = Shape(
    name="small-gpt",
    family="gpt2",
    layers=2,
    width=24,
    heads=4,
    kv_heads=4,
    head_dim=6,
    ffn=96,
    vocab=67,
    max_seq=64,
    tied=True,
    norm="layer",
    norm_bias=True,
    activation="gelu_tanh",
    positions="learned",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    dropout=0.1,
)

MOE = replace(
    LLAMA,
    name="small-moe",
    moe=Moe(experts=6, top_k=2, ffn=16, shared=1, shared_ffn=12, first_dense=1, renormalise=True),
)
# All that DeepSeek-V3 has: latents, groups, sigmoids, a bias, one token further ahead.
DEEPSEEK = Shape(
    name="small-deepseek",
    family="deepseek_v3",
    layers=3,
    width=24,
    heads=4,
    kv_heads=4,
    head_dim=10,
    ffn=40,
    vocab=67,
    max_seq=64,
    rope_interleaved=True,
    rope=Rope("yarn", 40.0, 256, mscale=0.707, mscale_all_dim=1.0),
    mla=Mla(kv_rank=12, nope_dim=6, rope_dim=4, value_dim=8, q_rank=14),
    moe=Moe(
        experts=8,
        top_k=3,
        ffn=16,
        shared=1,
        shared_ffn=16,
        first_dense=1,
        score="sigmoid",
        renormalise=True,
        scaling=2.5,
        groups=4,
        groups_kept=2,
        group_score="top2",
        bias=True,
    ),
    mtp=1,
)


def filled(shape: Shape, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """A decoder with initial values; norms and biases are shaken so that none is 1 or 0."""
    decoder = from_config(shape, dtype=dtype)
    init_weights(decoder, shape, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            shake = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * shake.to(dtype))
        for buffer in decoder.buffers():
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return decoder


def batch_of(
    shape: Shape, rows: int = 2, seq: int = 16, seed: int = 1, documents: torch.Tensor | None = None
) -> TokenBatch:
    """Random tokens; labels are the next tokens, and a few of them are not counted."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocab, (rows, seq + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 3:5] = -100
    positions = torch.arange(seq).expand(rows, seq)
    packed = None if documents is None else Documents.of(documents)
    batch = TokenBatch(tokens[:, :-1], labels, positions, packed)
    return look_ahead(batch, shape.mtp)


def gradients(decoder: Decoder, batch: TokenBatch) -> dict[str, torch.Tensor]:
    """Of the summed loss, by name; the decoder's own are reset first."""
    decoder.zero_grad()
    decoder(batch.tokens, batch).backward()
    named = {name: each.grad for name, each in decoder.named_parameters()}
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


def state_from_hf(shape: Shape, hf_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by our names, as views where possible; every problem in one error."""
    given = names_in_files(shape, hf_state)
    sizes = {name: tuple(hf_state[old].shape) for name, old in given.items()}
    problems = list(mismatches(shape, sizes))
    if problems:
        raise BadFile(f"Hugging Face weights for {shape.name!r}", problems)
    return {
        weight.name: weight_from_hf(shape, weight, lambda name: hf_state[given[name]])
        for weight in (*weights(shape), *buffers(shape))
    }


def state_to_hf(shape: Shape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors by their names; a tied head is written once, as the embedding."""
    out = {
        name: tensor_to_hf(tensor, state.__getitem__) for name, tensor in hf_tensors(shape).items()
    }
    return out | {copy: out[name].clone() for copy, name in published_copies(shape)}
