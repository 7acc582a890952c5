"""A second trainer, in plain PyTorch and one process, that shares no code with fivefold.

It reads the same plan file and the same token folders, and writes out all that training does: the
learning rate, clipping, accumulation, the optimizers, loss scaling, evaluation and the order of the
data. It follows docs/training.md, docs/optimizers.md, docs/expert.md and docs/tokens.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.judge.decoder import Balance, Model, Weights, first_weights, summed_loss
from tests.judge.masks import Masks
from tests.judge.tokens import Row, Samples

USUAL: dict[str, Any] = {
    **{"steps": 20, "optimizer": "adamw", "lr": 1e-3, "lr_curve": "cosine", "warmup": None},
    **{"weight_decay": 0.1, "clip": 1.0, "seed": 0, "data": "stdlib", "states": "fp32"},
    **{"eval_every": 0, "skip_limit": 10},
}
UNCHANGING = (
    "offload",
    "offload_grads",
    "save_every",
    "mtbf_hours",
    "copy_every",
    "copy_domain",
    "sample_every",
    "keep",
    "keep_best",
    "eval_data",
    "log",
    "callbacks",
    "events",
    "compile",
    "compare_every",
    "replay",
    "spike_bound",
    "hang_after",
)  # change no number
ELSEWHERE = {
    **dict.fromkeys(("lora", "lora_alpha", "lora_targets", "train_only"), "verify, and PEFT"),
    "loss": "transformers, with labels of -100",
    "dpo_beta": "the published formula on the judge's decoder (tests/ranks/test_preference.py)",
}  # who compares keys that no case has


@dataclass(frozen=True)
class Trained:
    """What a training shows after every step, and what it leaves behind."""

    steps: list[dict[str, Any]]
    weights: Weights
    states: dict[str, Weights]
    loads: dict[int, Tensor]  # of experts in the last step, by layer
    biases: dict[int, Tensor]  # of routers, by layer
    facts: dict[str, Any]


def learning_rate(recipe: Mapping[str, Any], step: int) -> float:
    """Of a step, from 1. The first step after the warmup still has the peak."""
    steps, peak, curve = recipe["steps"], recipe["lr"], recipe["lr_curve"]
    warmup = max(1, steps // 10) if recipe["warmup"] is None else recipe["warmup"]
    if step <= warmup:
        return peak * (step / warmup)
    passed = (step - warmup - 1) / (steps - warmup)  # of the steps after the warmup
    falling = max(1, steps // 5)
    shares = {
        "constant": 1.0,
        "linear": 1.0 - passed,
        "cosine": 0.55 + 0.45 * math.cos(math.pi * passed),
        "wsd": min(1.0, (steps - step + 1) / falling),
    }
    return peak * shares[curve]


class Optimizer:
    """AdamW, SGD or Muon over full weights, one after another."""

    def __init__(self, recipe: Mapping[str, Any], weights: Weights) -> None:
        self.recipe, self.weights, self.updates = recipe, weights, 0
        self.states: dict[str, Weights] = {}

    def step(self, gradients: Weights, lr: float) -> None:
        self.updates += 1
        rule = {"adamw": self._adamw, "sgd": self._sgd, "muon": self._muon}
        for name, weight in self.weights.items():
            decay = self.recipe["weight_decay"] if weight.dim() > 1 else 0.0
            hidden = weight.dim() > 1 and name not in ("embed.weight", "head.weight")
            kind = self.recipe["optimizer"]
            chosen = "adamw" if kind == "muon" and not hidden else kind
            rule[chosen](name, weight, gradients[name], lr, decay)

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        mean, square = self._state("exp_avg", name), self._state("exp_avg_sq", name)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        unbiased = mean / (1 - 0.9**self.updates), square / (1 - 0.95**self.updates)
        weight -= lr * decay * weight
        weight -= lr * unbiased[0] / (unbiased[1].sqrt() + 1e-5)
        self._keep(name, {"exp_avg": mean, "exp_avg_sq": square})

    def _sgd(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        momentum = 0.9 * self._state("momentum", name) + gradient + decay * weight
        weight -= lr * momentum
        self._keep(name, {"momentum": momentum})

    def _muon(self, name: str, weight: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
        momentum = 0.95 * self._state("momentum", name) + gradient
        self._keep(name, {"momentum": momentum})
        update = gradient + 0.95 * momentum
        matrices = update if update.dim() == 3 else update[None]
        for matrix, target in zip(matrices, weight.view(matrices.shape), strict=True):
            x = matrix / matrix.square().sum().sqrt()
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
            target -= lr * decay * target
            target -= lr * 0.2 * math.sqrt(max(matrix.shape)) * x

    def _state(self, key: str, name: str) -> Tensor:
        found = self.states.setdefault(key, {}).get(name, torch.zeros_like(self.weights[name]))
        return found.to(self.weights[name].dtype)

    def _keep(self, name: str, states: Weights) -> None:
        """Store states; in bfloat16 each takes its own half of the random bits."""
        bits = None
        if self.recipe["states"] == "bf16":
            key = f"{self.recipe['seed']} {self.updates} {name}".encode()
            bits = random_bits(key, self.weights[name].numel())
        for number, (key, state) in enumerate(states.items()):
            half = None if bits is None else bits >> np.uint32(16 * number) & np.uint32(0xFFFF)
            self.states[key][name] = state if half is None else rounded(state, half)


def random_bits(text: bytes, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """32 bits for each element: MurmurHash3's finalizer of its index and a hash of the text."""
    key = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    x = np.arange(count, dtype=np.uint32) ^ np.uint32(key)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def rounded(state: Tensor, bits: np.ndarray[Any, np.dtype[np.uint32]]) -> Tensor:
    """To bfloat16: the lower half of a float32 plus 16 random bits carries into the upper one."""
    words = state.float().flatten().numpy().view(np.uint32) + bits & np.uint32(0xFFFF0000)
    return torch.tensor(words.view(np.float32)).view_as(state).bfloat16()


class Trainer:
    """One training of a plan file, in the numbers of `dtype`."""

    def __init__(self, plan: Mapping[str, Any], model: Model, dtype: torch.dtype) -> None:
        self.recipe: dict[str, Any] = {**USUAL, **plan.get("train", {})}
        self.model, self.dtype, self.batch = model, dtype, int(plan["batch"])
        self.size, self.packed = plan.get("microbatch_size", 1), plan.get("packed", False)
        seed, wide = self.recipe["seed"], torch.promote_types(dtype, torch.float32)
        self.samples = Samples(self.recipe["data"], model.vocab, plan["seq"], seed)
        self.rows = iter(self.samples)
        # Narrow weights begin as the rounded wide ones; the optimizer updates wide copies of them.
        first = first_weights(model, seed, wide)
        self.masters = {name: one.to(dtype).to(wide) for name, one in first.items()}
        self.optimizer = Optimizer(self.recipe, self.masters)
        self.balance = Balance.of(plan.get("balance", "none"), model, self.batch * plan["seq"])
        self.scales_loss = dtype == torch.float16
        self.scale, self.good_steps, self.skipped_in_a_row = 1.0, 0, 0
        if self.scales_loss:
            self.scale = 65536.0

    def run(self) -> Trained:
        steps = list[dict[str, Any]]()
        while len(steps) < self.recipe["steps"]:
            if self.skipped_in_a_row > self.recipe["skip_limit"]:
                break
            steps.append(self.step(len(steps) + 1))
        updates = self.optimizer.updates
        facts = {"step": len(steps), "updates": updates, "skipped": len(steps) - updates}
        facts |= {"samples": self.batch * len(steps), "seed": self.recipe["seed"]}
        good_steps = self.good_steps if self.scales_loss else 0
        scaler = {"dynamic": float(self.scales_loss), "scale": self.scale, "good_steps": good_steps}
        scaler["skipped_in_a_row"] = self.skipped_in_a_row
        biases = self.balance.biases if self.model.biased else {}
        states, loads = self.optimizer.states, self.balance.loads
        return Trained(steps, self.masters, states, loads, biases, facts | {"scaler": scaler})

    def step(self, number: int) -> dict[str, Any]:
        """One step, and what it shows. One with a loss or norm that is not finite changes nothing
        but the scale of the loss."""
        first = (number - 1) * self.batch
        loss, gradients = self._gradients(list(islice(self.rows, self.batch)), first)
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients.values()))
        lr, good = learning_rate(self.recipe, number), math.isfinite(loss + norm)
        if good:
            coefficient = min(1.0, self.recipe["clip"] / (norm + 1e-6))  # the 1e-6 is torch's
            clipped = {name: coefficient * one for name, one in gradients.items()}
            self.optimizer.step(clipped, lr)
        shown: dict[str, Any] = {"loss": loss, "norm": norm, "lr": lr, "skipped": not good}
        shown["fullest"] = self.balance.end_step() if good else self.balance.forget_step()
        self._end_step(good)
        shown["scale"] = self.scale if self.scales_loss else None
        every, last = self.recipe["eval_every"], number == self.recipe["steps"]
        due = every and (last or number % every == 0)
        return shown | {"eval_loss": self._evaluate() if due else None}

    def _gradients(self, rows: Sequence[Row], first: int) -> tuple[float, Weights]:
        """The loss of a step and its gradients, summed over microbatches of neighbouring rows. All
        is divided once, by the tokens of the step that have something to predict. `first` is the
        number of the first sample."""
        weights = {
            name: one.detach().to(self.dtype).requires_grad_() for name, one in self.masters.items()
        }
        gradients = {name: torch.zeros_like(one) for name, one in self.masters.items()}
        groups = [self._tensors(rows[i : i + self.size]) for i in range(0, len(rows), self.size)]
        counted = max(1, sum(num_labels(*group) for group in groups))
        loss = 0.0
        for number, group in enumerate(groups):
            self.balance.losses.clear()
            begin, (count, length) = first + number * self.size, group[0].shape
            masks = Masks(self.recipe["seed"], range(begin, begin + count), length - 1)
            part = summed_loss(self.model, weights, self.balance, *group, masks) / counted
            total = sum(self.balance.losses, part) * self.scale
            found = torch.autograd.grad(total, list(weights.values()))
            for gradient, one in zip(gradients.values(), found, strict=True):
                gradient += one.to(gradient.dtype) / self.scale
            loss += float(part.detach())
        return loss, gradients

    def _end_step(self, good: bool) -> None:
        """The scale of the loss halves after an overflow, and doubles after 500 steps without one.
        An overflow at a scale above 1 says nothing about the model."""
        explained = self.scale > 1
        self.skipped_in_a_row = 0 if good or explained else self.skipped_in_a_row + 1
        self.good_steps = self.good_steps + 1 if good else 0
        if self.scales_loss and not good:
            self.scale = max(1.0, self.scale / 2)
        elif self.scales_loss and self.good_steps == 500:
            self.scale, self.good_steps = 2 * self.scale, 0

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """The mean loss of all tokens in rows that are never trained on, row by row."""
        weights = {name: one.to(self.dtype) for name, one in self.masters.items()}
        groups = [self._tensors([row]) for row in self.samples.held_out(8 * self.batch)]
        found = [float(summed_loss(self.model, weights, self.balance, *each)) for each in groups]
        self.balance.forget_step()
        tokens = sum(num_labels(*group) for group in groups)
        return sum(found) / tokens if tokens else None

    def _tensors(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None]:
        tokens = torch.tensor(np.stack([row.tokens for row in rows]))
        begins = torch.tensor(np.stack([row.begins for row in rows]))
        return tokens, begins if self.packed else None


def num_labels(tokens: Tensor, begins: Tensor | None) -> int:
    """How many tokens have one to predict: the last of a document has none."""
    return tokens[:, 1:].numel() - (0 if begins is None else int(begins[:, 1:].sum()))
