"""A decoder with grouped-query attention and, if asked, experts: every weight in one dictionary.

Every expert computes every token here, and a token that did not choose it has the weight 0: there
is nothing to sort, to send or to gather.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.judge.masks import ATTENTION, MLP, PAIRS, Masks

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """The numbers of a model; without experts, `experts` is 0."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False
    experts: int = 0
    top_k: int = 2
    expert_ffn: int = 0
    shared_ffn: int = 0
    biased: bool = False  # a bias on the choice of experts
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def has_experts(self, layer: int) -> bool:
        """All layers but the first."""
        return self.experts > 0 and layer > 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and sizes of all weights."""
        width, of_keys = self.width, self.width // self.heads * self.kv_heads
        found: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, width)}
        for i in range(self.layers):
            block = f"blocks.{i}."
            found[block + "attention_norm.weight"] = found[block + "mlp_norm.weight"] = (width,)
            for name, size in (("q", width), ("k", of_keys), ("v", of_keys), ("out", width)):
                found[f"{block}attention.{name}.weight"] = (size, width)
            if not self.has_experts(i):
                found |= _mlp(block + "mlp.", self.ffn, width)
                continue
            found[block + "mlp.router.weight"] = (self.experts, width)
            stacked = _mlp(block + "mlp.experts.", self.expert_ffn, width)
            found |= {name: (self.experts, *sizes) for name, sizes in stacked.items()}
            found |= _mlp(block + "mlp.shared.", self.shared_ffn, width)
        found["norm.weight"] = (width,)
        return found if self.tied else found | {"head.weight": (self.vocab, width)}


def _mlp(prefix: str, ffn: int, width: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
    return {f"{prefix}{name}.weight": size for name, size in sizes.items()}


def first_weights(model: Model, seed: int, dtype: torch.dtype) -> Weights:
    """Norms are 1; a matrix is drawn from the seed and its name, an expert from its number too."""

    def draw(name: str, sizes: tuple[int, ...]) -> Tensor:
        into_residual = name.split(":")[0].endswith((".out.weight", ".down.weight"))
        deviation = 0.02 / math.sqrt(2 * model.layers) if into_residual else 0.02
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).hexdigest()
        generator = torch.Generator().manual_seed(int(digest, 16) // 2)
        return torch.empty(sizes, dtype=dtype).normal_(0.0, deviation, generator=generator)

    found: Weights = {}
    for name, sizes in model.shapes().items():
        if len(sizes) == 1:
            found[name] = torch.ones(sizes, dtype=dtype)
        elif len(sizes) == 2:
            found[name] = draw(name, sizes)
        else:
            found[name] = torch.stack([draw(f"{name}:{i}", sizes[1:]) for i in range(sizes[0])])
    return found


@dataclass
class Balance:
    """What balances the experts: the rules with their coefficients, and what a step counts."""

    rules: dict[str, float]
    tokens: int  # of a step
    loads: dict[int, Tensor]  # of the step before, by layer
    biases: dict[int, Tensor]
    slots: dict[int, Tensor]  # of this step so far
    losses: list[Tensor]  # of this microbatch

    @classmethod
    def of(cls, text: str, model: Model, tokens: int) -> Balance:
        usual = {"aux": 0.01, "aux-seq": 0.0001, "aux-global": 0.01, "z": 0.001, "bias": 0.001}
        words = [word.partition(":") for word in text.split("+") if word != "none"]
        rules = {word: float(number) if number else usual[word] for word, _, number in words}
        layers = [i for i in range(model.layers) if model.has_experts(i)]
        loads = {i: torch.full((model.experts,), 1 / model.experts).double() for i in layers}
        biases = {i: torch.zeros(model.experts) for i in layers}
        return cls(
            rules, tokens, loads, biases, {i: torch.zeros(model.experts) for i in layers}, []
        )

    def route(self, layer: int, logits: Tensor, rows: int, top_k: int, biased: bool) -> Tensor:
        """The weight of every expert for every token, 0 where it is not chosen."""
        scores = logits.softmax(-1)
        ranked = scores.detach() + (self.biases[layer] if biased else 0.0)
        chosen = ranked.argsort(dim=1, descending=True, stable=True)[:, :top_k]
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        self.slots[layer] = self.slots[layer] + mask.sum(0)
        self._add_losses(layer, logits, scores, mask, rows)
        kept = mask * scores
        return kept / kept.sum(1, keepdim=True) * self._within_capacity(scores, mask, rows, top_k)

    def _add_losses(
        self, layer: int, logits: Tensor, scores: Tensor, mask: Tensor, rows: int
    ) -> None:
        """Of the rules that are losses. A load is the share of an expert in all slots of a unit:
        the microbatch, the row, or the step before."""
        tokens, experts = mask.shape
        of_rows = mask.view(rows, tokens // rows, experts).mean(1) / mask[0].sum()
        loads = {
            "aux": mask.mean(0) / mask[0].sum(),
            "aux-seq": of_rows.repeat_interleave(tokens // rows, 0),
            "aux-global": self.loads[layer].to(scores.dtype),
        }
        values = {rule: experts * (load * scores).sum() for rule, load in loads.items()}
        values["z"] = logits.logsumexp(1).square().sum()
        used = self.rules.keys() & values.keys()
        self.losses += [self.rules[rule] * values[rule] / self.tokens for rule in sorted(used)]

    def _within_capacity(self, scores: Tensor, mask: Tensor, rows: int, top_k: int) -> Tensor:
        """1 where an expert has room for the token among the tokens of its row, else 0."""
        found = torch.ones_like(mask)
        for rule in self.rules.keys() & {"capacity", "capacity-position", "capacity-pad"}:
            seq, experts = len(mask) // rows, mask.shape[1]
            room = math.ceil(self.rules[rule] * top_k * seq / experts)
            first = scores.detach() if rule != "capacity-position" else torch.zeros_like(scores)
            first = first.float()  # rounding decides nothing between equal scores
            wish = torch.where(mask > 0, first, -1.0).view(rows, seq, experts)
            place = wish.argsort(dim=1, descending=True, stable=True).argsort(1)
            found = (place < room).to(mask).flatten(0, 1)
        return found

    def end_step(self) -> float | None:
        """Loads and biases follow what a step has counted; returns how much the fullest expert has
        of the mean, as a mean over layers."""
        for layer, slots in self.slots.items():
            self.loads[layer] = slots.double() / slots.sum()
            change = self.rules.get("bias", 0.0) * (slots.mean() - slots).sign()
            self.biases[layer] = self.biases[layer] + change.float()
        fullest = [float(slots.max() / slots.mean()) for slots in self.slots.values()]
        self.forget_step()
        return sum(fullest) / len(fullest) if fullest else None

    def forget_step(self) -> None:
        """Of a step that was skipped, or of an evaluation, nothing counts."""
        self.slots = {layer: torch.zeros_like(slots) for layer, slots in self.slots.items()}


def summed_loss(
    model: Model,
    w: Weights,
    balance: Balance,
    tokens: Tensor,
    begins: Tensor | None,
    masks: Masks | None = None,
) -> Tensor:
    """The summed loss of rows of `seq + 1` tokens. With `begins`, a token sees its own document
    only, and the last one of a document has nothing to predict. Without `masks` nothing is
    dropped."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    rows, seq = inputs.shape
    places = torch.arange(seq)
    positions, visible = places.expand(rows, seq), places[:, None] >= places[None, :]
    if begins is not None:
        labels = labels.where(~begins[:, 1:], -100)
        document = begins[:, :-1].cumsum(1)
        visible = visible & (document[:, :, None] == document[:, None, :])
        positions = places - (places * begins[:, :-1]).cummax(1).values
    x = _dropped(model, w["embed.weight"][inputs], masks, 0)
    for i in range(model.layers):
        block = f"blocks.{i}."
        normed = _norm(x, w[block + "attention_norm.weight"])
        pairs = None
        if masks is not None and model.attention_dropout:
            pairs = masks.pairs(3 * i + PAIRS, model.heads, model.attention_dropout)
        y = _attention(model, w, block + "attention.", normed, positions, visible, pairs)
        x = x + _dropped(model, y, masks, 3 * i + ATTENTION)
        normed = _norm(x, w[block + "mlp_norm.weight"])
        y = (
            _experts(model, w, balance, i, normed)
            if model.has_experts(i)
            else _gated(normed, w, block + "mlp.")
        )
        x = x + _dropped(model, y, masks, 3 * i + MLP)
    logits = _norm(x, w["norm.weight"]) @ w["embed.weight" if model.tied else "head.weight"].T
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide).flatten(0, 1), labels.flatten(), reduction="sum")


def _dropped(model: Model, x: Tensor, masks: Masks | None, site: int) -> Tensor:
    if masks is None or not model.dropout:
        return x
    return x * masks.features(site, model.width, model.dropout).to(x.dtype)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight).to(x.dtype)


def _gated(x: Tensor, w: Weights, prefix: str, expert: int | None = None) -> Tensor:
    gate, up, down = (w[f"{prefix}{name}.weight"] for name in ("gate", "up", "down"))
    if expert is not None:
        gate, up, down = gate[expert], up[expert], down[expert]
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _experts(model: Model, w: Weights, balance: Balance, layer: int, x: Tensor) -> Tensor:
    prefix, flat = f"blocks.{layer}.mlp.", x.flatten(0, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = flat.to(wide) @ w[prefix + "router.weight"].to(wide).T
    shares = balance.route(layer, logits, len(x), model.top_k, model.biased)
    total = torch.zeros_like(flat, dtype=wide)
    for expert in range(model.experts):
        output = _gated(flat, w, prefix + "experts.", expert)
        total = total + shares[:, expert : expert + 1] * output
    return total.to(x.dtype).view_as(x) + _gated(x, w, prefix + "shared.")


def _attention(
    model: Model,
    w: Weights,
    prefix: str,
    x: Tensor,
    positions: Tensor,
    visible: Tensor,
    pairs: Tensor | None,
) -> Tensor:
    size = model.width // model.heads
    q, k, v = ((x @ w[f"{prefix}{name}.weight"].T).view(*x.shape[:2], -1, size) for name in "qkv")
    q, k = _rotate(q, positions), _rotate(k, positions)
    k, v = (each.repeat_interleave(model.heads // model.kv_heads, 2) for each in (k, v))
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide)) / math.sqrt(size)
    mask = visible if visible.dim() == 2 else visible[:, None]
    shares = scores.masked_fill(~mask, -math.inf).softmax(-1)
    shares = shares if pairs is None else shares * pairs.to(wide)
    out = torch.einsum("bhqk,bkhd->bqhd", shares, v.to(wide)).to(x.dtype)
    return out.flatten(2) @ w[prefix + "out.weight"].T


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, pairs of the first and second half of a head."""
    half, wide = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=wide) / half)
    angles = (positions[..., None].to(wide) * frequencies)[:, :, None]
    turned = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.complex(x[..., :half].to(wide), x[..., half:].to(wide)) * turned
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)
