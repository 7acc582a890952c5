"""A block of your own in the place of attention: one class, and it gains all five dimensions.

    python examples/own_model.py                     verify it in nine layouts, plan it, train it
    python examples/own_model.py observe runs/own    any other command knows the block as well

The block is gated linear attention, as in Mamba-2 and GLA: each head has a state, a matrix that
decays by a number which depends on the token, and to which every token adds key × value. It is
computed in chunks, so that most of it is matmuls.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

import fivefold as ff
from fivefold.cli import main

CHUNK = 16  # tokens


class GatedScan(ff.Mixer, name="gated-scan"):
    """Gated linear attention. Shapes: B rows, S tokens, H heads, d width of a head, C a chunk."""

    def table(self, shape: ff.Shape) -> Sequence[ff.MixerWeight]:
        """Every weight: its name, its shape, how tp splits it, and what it reads."""
        inner, width = shape.heads * shape.head_dim, shape.width
        return (
            ff.MixerWeight("q", (inner, width), "heads"),
            ff.MixerWeight("k", (inner, width), "heads"),
            ff.MixerWeight("v", (inner, width), "heads"),
            ff.MixerWeight("gate", (inner, width), "heads"),
            ff.MixerWeight("step", (shape.heads, width), "heads", bias=True),
            ff.MixerWeight("decay", (shape.heads,), "heads", reads="nothing", first=(-2.0, 1.0)),
            ff.MixerWeight("norm", (shape.head_dim,), "whole", reads="nothing"),
            ff.MixerWeight("out", (width, inner), "heads", reads="mixed"),
        )

    def mix(self, shape: ff.Shape, tensors: Mapping[str, Tensor], tokens: object) -> Tensor:
        """Plain PyTorch on the heads that are given; how many these are does not matter."""
        q, k, v = (
            tensors[name].unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for name in "qkv"
        )
        rate_BHS = F.softplus(tensors["step"].transpose(1, 2) + tensors["decay"][:, None])
        mixed_BHSd = scan(q * shape.head_dim**-0.5, k, v, -rate_BHS)
        normed = F.rms_norm(mixed_BHSd, (shape.head_dim,), tensors["norm"], shape.norm_eps)
        return normed.transpose(1, 2).flatten(2) * F.silu(tensors["gate"])

    def cost(self, shape: ff.Shape, seq: int) -> ff.MixerCost:
        """For the planner: FLOPs and elements of a token, of all heads, in forward."""
        heads, d, inner = shape.heads, shape.head_dim, shape.heads * shape.head_dim
        flops = 4 * (CHUNK + d) * inner  # pairs of a chunk, and states
        saved = 7 * inner + 4 * (CHUNK + 1) * heads + d * inner / CHUNK  # as autograd counts them
        moved = 3 * saved  # written once, read twice
        return ff.MixerCost(flops, saved, moved, kernels=19 * seq / CHUNK)


def scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """y_t = q_t · state_t, with state_t = decay_t · state_{t−1} + k_t × v_t, chunk by chunk."""
    state_BHdd = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    mixed: list[Tensor] = []
    parts = (each.split(CHUNK, dim=2) for each in (q, k, v, log_decay))
    for q_C, k_C, v_C, log_C in zip(*parts, strict=True):
        total_C = log_C.cumsum(-1)  # of the decays since the chunk began
        between_CC = (total_C[..., :, None] - total_C[..., None, :]).tril().exp().tril()
        inside = (q_C @ k_C.mT * between_CC) @ v_C
        mixed.append(inside + (q_C * total_C.exp()[..., None]) @ state_BHdd)
        left_C1 = (total_C[..., -1:] - total_C).exp()[..., None]
        state_BHdd = state_BHdd * total_C[..., -1:, None].exp() + (k_C * left_C1).mT @ v_C
    return torch.cat(mixed, dim=2)


OWN = {"mixer": "gated-scan", "positions": "none"}
SHAPE = replace(ff.shape("tiny"), name="own", layers=4, kv_heads=8, **OWN)
EXPERTS = replace(ff.shape("tiny-moe"), name="own-moe", layers=4, kv_heads=8, **OWN)
LARGE = replace(ff.shape("llama-3.1-8b"), name="own-8b", rope=None, kv_heads=32, **OWN)
LAYOUTS = [
    (SHAPE, {"layout": "dp=2", "zero": 1}),
    (SHAPE, {"layout": "dp=2", "zero": 3}),
    (SHAPE, {"layout": "tp=2"}),
    (SHAPE, {"layout": "tp=4", "sp": False}),
    (SHAPE, {"layout": "pp=2", "schedule": "zb-h1"}),
    (SHAPE, {"layout": "cp=2", "context": "ulysses"}),
    (SHAPE, {"layout": "dp=2 tp=2 pp=2", "zero": 2, "schedule": "interleaved"}),
    (EXPERTS, {"layout": "dp=2 ep=2", "zero": 3}),
    (EXPERTS, {"layout": "dp=2 tp=2 cp=2 ep=2", "context": "ulysses"}),
]


def show() -> None:
    """Verify, plan and train."""
    print(
        f"{'model':8} {'layout':22} {'more':34} {'loss':>8} {'gradient':>8} {'weight':>8}  traffic"
    )
    for shape, keys in LAYOUTS:
        found = ff.verify(shape, **keys).to_json()
        more = ", ".join(f"{key}={one}" for key, one in keys.items() if key != "layout")
        errors = "".join(f" {found[key]:8.1e}" for key in ("loss_err", "grad_err", "weight_err"))
        traffic = "as predicted" if found["traffic"]["match"] else "DIFFERS"
        print(f"{shape.name:8} {keys['layout']:22} {more:34}{errors}  {traffic}")
        if not found["passed"]:
            raise SystemExit(f"diverges at {found['diverges_at']}")
    for refused in ({"layout": "tp=3"}, {"layout": "cp=2"}, {"precision": "fp8"}):
        try:
            ff.verify(SHAPE, **refused)
        except ff.FivefoldError as error:
            print(f"\nrefused: {refused}\n{error}")
    print(f"\n{ff.search(LARGE, gpus=64, machine='h100', seq=4096, batch=256, top=3)}\n")
    with TemporaryDirectory() as folder:
        keys = {"layout": "dp=2 tp=2", "steps": 12, "lr": 1e-2, "seq": 64, "batch": 8}
        run = ff.train(SHAPE, out=Path(folder) / "own", **keys)
    print(f"loss {run.losses[0]:.3f} at the first step, {run.losses[-1]:.3f} at the last")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    show()
