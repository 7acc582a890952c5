"""Mixers of a user: the example's, sound ones with other tables, and some with a fault each.

A process may run a class once, so that all tests have them from here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fivefold as ff
from fivefold.core.model import presets as models
from fivefold.core.model.mixers import MixerTokens

PATH = Path(__file__).parent.parent / "examples" / "own_model.py"


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = _loaded()
SHAPE: ff.Shape = replace(EXAMPLE.SHAPE, layers=2)


def with_mixer(name: str, **changes: Any) -> str:
    """A small model with this mixer, as a text that a plan names."""
    return models.to_text(replace(SHAPE, mixer=name, **changes))


class RotatedGroups(ff.Mixer, name="test-groups"):
    """Softmax attention by hand: KV heads of their own, rotary positions, documents."""

    rotates, packs = True, True

    def table(self, shape: ff.Shape) -> Sequence[ff.MixerWeight]:
        queries, keys = (each * shape.head_dim for each in (shape.heads, shape.kv_heads))
        return (
            ff.MixerWeight("out", (shape.width, queries), "heads", "mixed", bias=True),
            ff.MixerWeight("q", (queries, shape.width), "heads"),
            ff.MixerWeight("keys", (keys, shape.width), "kv_heads", bias=True),
            ff.MixerWeight("values", (keys, shape.width), "kv_heads"),
            ff.MixerWeight("scale", (shape.kv_heads, 1), "kv_heads", "nothing", first=(1.0, 2.0)),
        )

    def mix(self, shape: ff.Shape, tensors: Mapping[str, Tensor], tokens: MixerTokens) -> Tensor:
        q, k, v = (
            tensors[name].unflatten(-1, (-1, shape.head_dim)) for name in ("q", "keys", "values")
        )
        q, k = (_rotated(each, *tokens.rotary) for each in (q, k))
        k = k * tensors["scale"]
        k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
        documents = (tokens.positions == 0).cumsum(1)
        sees = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        heads = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=sees).transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


class SharedStates(ff.Mixer, name="test-shared"):
    """As in Mamba-2, all heads share what writes to the states and what reads them."""

    def table(self, shape: ff.Shape) -> Sequence[ff.MixerWeight]:
        inner, width, size = shape.heads * shape.head_dim, shape.width, shape.head_dim
        return (
            ff.MixerWeight("x", (inner, width), "heads"),
            ff.MixerWeight("write", (size, width), "whole"),
            ff.MixerWeight("read", (size, width), "whole", bias=True),
            ff.MixerWeight("skip", (shape.heads, 1), "heads", "nothing"),
            ff.MixerWeight("scale", (shape.head_dim,), "whole", "nothing"),
            ff.MixerWeight("out", (width, inner), "heads", "mixed"),
        )

    def mix(self, shape: ff.Shape, tensors: Mapping[str, Tensor], tokens: MixerTokens) -> Tensor:
        x_BSHd = tensors["x"].unflatten(-1, (-1, shape.head_dim))
        pairs_BSS = (tensors["read"] @ tensors["write"].mT).tril()
        mixed = torch.einsum("bst,bthd->bshd", pairs_BSS, x_BSHd) * tensors["scale"]
        return (mixed + x_BSHd * tensors["skip"]).flatten(2)


class WrongSplit(EXAMPLE.GatedScan, name="test-wrong-split"):
    """The decays of heads are whole in the table: every rank takes those of the first heads."""

    def table(self, shape: ff.Shape) -> Sequence[ff.MixerWeight]:
        rows = super().table(shape)
        return [replace(each, split="whole") if each.name == "decay" else each for each in rows]

    def mix(self, shape: ff.Shape, tensors: Mapping[str, Tensor], tokens: MixerTokens) -> Tensor:
        heads = tensors["step"].shape[-1]
        return super().mix(shape, {**tensors, "decay": tensors["decay"][:heads]}, tokens)


class AcrossHeads(EXAMPLE.GatedScan, name="test-across"):
    """Normalises over all heads: a sum over tp is missing, which no table can say."""

    def mix(self, shape: ff.Shape, tensors: Mapping[str, Tensor], tokens: MixerTokens) -> Tensor:
        mixed = super().mix(shape, tensors, tokens)
        return F.rms_norm(mixed, mixed.shape[-1:])


class LooksAhead(EXAMPLE.GatedScan, name="test-ahead"):
    """Adds the mean of the row: a token sees later ones, and padding."""

    def mix(self, shape: ff.Shape, tensors: Mapping[str, Tensor], tokens: MixerTokens) -> Tensor:
        mixed = super().mix(shape, tensors, tokens)
        return mixed + mixed.mean(1, keepdim=True)
