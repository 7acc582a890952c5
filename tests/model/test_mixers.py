"""Mixers of a user: their tables, what is refused, what planning says, and the example itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fivefold as ff
from fivefold.cli import main
from fivefold.core.layout.weight_table import by_name, weights
from fivefold.core.model import presets as models
from fivefold.core.model.mixers import MixerTokens, mixer_cost, mixer_table
from fivefold.core.model.shape import layer_flops, parameters
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.huggingface.config_export import as_hf
from fivefold.launch.launcher import require_trainable
from fivefold.model.batch import TokenBatch
from fivefold.model.decoder import from_config
from fivefold.model.init import init_weights
from fivefold.rehearse.job import judged
from fivefold.rehearse.rank import rehearse_rank
from tests.own_mixers import EXAMPLE, SHAPE, with_mixer

MIXERS = {
    "gated-scan": {},
    "test-groups": {"positions": "rotary", "kv_heads": 2},
    "test-shared": {},
}


def planned(layout: str = "dp=1", mixer: str = "gated-scan", **options: Any) -> ff.Plan:
    return resolve(PlanOptions(with_mixer(mixer), layout=layout, **options), small=True)


@pytest.mark.parametrize("name", MIXERS)
def test_the_table_names_and_counts_every_weight(name: str) -> None:
    shape = replace(SHAPE, mixer=name, **MIXERS[name])
    model = from_config(shape)
    found = {key: tuple(one.shape) for key, one in model.named_parameters()}
    assert found == {one.name: one.shape for one in weights(shape)}
    assert parameters(shape).total == sum(one.numel() for one in model.parameters())
    assert models.of_text(models.to_text(shape)) == shape


def test_first_values_are_those_of_the_table() -> None:
    model = from_config(SHAPE, dtype=torch.float64)
    init_weights(model, SHAPE, seed=0)
    found = dict(model.named_parameters())
    decay = found["blocks.1.attention.decay"].detach()
    assert torch.equal(decay, torch.linspace(-2.0, 1.0, 8, dtype=torch.float64))
    assert torch.equal(found["blocks.1.attention.norm"].detach(), torch.ones(8).double())
    assert 0.01 < float(found["blocks.1.attention.gate.weight"].detach().std()) < 0.03
    assert by_name(SHAPE)["blocks.0.attention.norm"].spread


def by_recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """The scan of the example, token by token."""
    state, mixed = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1]).to(q), list[Tensor]()
    for t in range(q.shape[2]):
        state = state * log_decay[:, :, t, None, None].exp()
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        mixed.append((q[:, :, t, None, :] @ state)[:, :, 0])
    return torch.stack(mixed, dim=2)


def test_the_chunks_of_the_example_are_its_recurrence() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 37, 4, dtype=torch.float64) for _ in range(3))
    log_decay = -torch.rand(2, 3, 37, dtype=torch.float64)
    wanted = by_recurrence(q, k, v, log_decay)
    torch.testing.assert_close(EXAMPLE.scan(q, k, v, log_decay), wanted, rtol=1e-12, atol=1e-12)


def test_no_token_of_the_example_sees_a_later_one() -> None:
    model = from_config(SHAPE, dtype=torch.float64)
    init_weights(model, SHAPE, seed=0)
    tokens = torch.arange(40).reshape(1, 40) % SHAPE.vocab
    labels = torch.full_like(tokens, -100)
    labels[:, :20] = 7
    changed = torch.cat([tokens[:, :20], tokens[:, 20:] + 1], dim=1)
    losses = [
        model(each, TokenBatch(each, labels, torch.arange(40).reshape(1, 40)))
        for each in (tokens, changed)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("head_dim", [8, 32])
def test_the_example_says_what_autograd_saves(head_dim: int) -> None:
    shape, seq = replace(SHAPE, head_dim=head_dim), 128
    mixer = shape.own_mixer
    assert mixer is not None
    rows = [each for each in mixer_table(shape) if each.reads != "mixed"]
    sizes = {each.name: (1, seq) * (each.reads == "input") + each.shape[:1] for each in rows}
    tensors = {name: torch.randn(size, requires_grad=True) for name, size in sizes.items()}
    saved: dict[int, int] = {}

    def pack(one: Tensor) -> Tensor:
        saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes() // 4
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        result = mixer.mix(shape, tensors, MixerTokens(None, None))
    for one in (*tensors.values(), result):
        saved.pop(one.untyped_storage().data_ptr(), None)
    assert sum(saved.values()) / seq == pytest.approx(mixer_cost(shape, seq).saved, rel=0.02)


class Changed(EXAMPLE.GatedScan, name="test-changed"):
    """The example with one row of its table changed."""

    change: Mapping[str, Any] = {}

    def table(self, shape: ff.Shape) -> Sequence[ff.MixerWeight]:
        name = self.change.get("of")
        more = {key: value for key, value in self.change.items() if key != "of"}
        return [
            replace(each, **more) if each.name == name else each for each in super().table(shape)
        ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"of": "k", "name": "q"}, "two weights are called q"),
        ({"of": "k", "name": "K"}, "a name has small letters"),
        ({"of": "k", "shape": (64, 8)}, "a linear of the input is (outputs, 64)"),
        ({"of": "step", "shape": (12, 64)}, "12 is no multiple of the 8 heads"),
        ({"of": "decay", "bias": True}, "it is no linear and has no bias"),
        ({"of": "norm", "shape": ()}, "every size is at least 1"),
        ({"of": "q", "first": (0.0, 1.0)}, "first is for tensors that read nothing"),
        ({"of": "out", "name": "back"}, "one weight reads what was mixed, and is called out"),
        ({"of": "out", "split": "whole"}, "what was mixed is split by heads"),
        ({"of": "out", "shape": (8, 64)}, "the linear back is (64, inputs)"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused(
    change: Mapping[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer_table.cache_clear()
    monkeypatch.setattr(Changed, "change", change)
    with pytest.raises(ff.FivefoldError, match="cannot use model") as refused:
        replace(SHAPE, mixer="test-changed")
    assert reason in str(refused.value)
    mixer_table.cache_clear()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"positions": "rotary"}, "does not use them; set none or learned"),
        ({"window": 8}, "window is a key of attention"),
        ({"qkv_bias": True}, "qkv_bias is a key of attention"),
        ({"attention_dropout": 0.1}, "attention_dropout is a key of attention"),
        ({"kv_heads": 4}, "splits nothing by KV heads; set 8"),
        ({"mixer": "gated-scam"}, "is not known in this process"),
    ],
    ids=str,
)
def test_keys_that_a_mixer_would_ignore_are_refused(changes: Any, reason: str) -> None:
    with pytest.raises(ff.FivefoldError) as refused:
        replace(SHAPE, **changes)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        ("tp=3", {}, "tp=3 does not divide heads 8: use tp=2 or tp=4"),
        ("cp=2", {}, "use context=ulysses, or cp=1"),
        ("cp=2", {"context": "allgather"}, "needs all tokens of a row in order"),
        ("cp=16", {"context": "ulysses"}, "cp=16 does not divide the 8 heads"),
        ("cp=2", {"context": "ulysses", "mixer": "test-shared"}, "write (whole), read (whole)"),
        ("ep=2", {}, "need experts and the model has none"),
        ("dp=1", {"precision": "fp8"}, "use precision = bf16"),
        ("dp=1", {"packed": True}, "say packs = True"),
        ("dp=1", {"recompute": "full-but-attention"}, "use recompute = full"),
    ],
)
def test_what_the_table_does_not_allow_is_refused(layout: str, options: Any, reason: str) -> None:
    with pytest.raises(ff.FivefoldError) as refused:
        planned(layout, **options)
    assert reason in str(refused.value)


def test_what_knows_attention_only_is_refused(tmp_path: Path) -> None:
    plan = planned(train=ff.plan("tiny", sample_every=2).plan.options.train)
    with pytest.raises(ff.FivefoldError, match="sample_every, which generates text, with mixer"):
        require_trainable(plan)
    with pytest.raises(ff.FivefoldError, match="a Hugging Face config with mixer gated-scan"):
        as_hf(SHAPE, "float32")
    (tmp_path / "plan.toml").write_text(planned().to_toml(tmp_path), encoding="utf-8")
    with pytest.raises(ff.FivefoldError, match="generation with mixer gated-scan"):
        ff.generate(tmp_path, "Once", max_tokens=1)
    with pytest.raises(ff.FivefoldError, match="generation with mixer gated-scan"):
        ff.verify(SHAPE, generate=True)


def test_a_command_that_does_not_know_the_mixer_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = planned().to_toml(tmp_path).replace("gated-scan", "unheard-of")
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(tmp_path / "plan.toml")])
    said = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and "import the file of its class first" in said


def test_a_name_is_given_once() -> None:
    with pytest.raises(ff.FivefoldError, match="there is a mixer 'gated-scan' already"):
        type("Again", (ff.Mixer,), {}, name="gated-scan")
    with pytest.raises(ff.FivefoldError, match="there is a mixer 'attention' already"):
        type("Plain", (ff.Mixer,), {}, name="attention")


def test_planning_uses_the_figures_of_the_class() -> None:
    job = {"layout": "dp=2 tp=2 cp=2", "context": "ulysses", "machine": "h100", "seq": 2048}
    found = ff.plan(SHAPE, **job)
    assert "by the figures of its cost()" in " ".join(found.plan.notes)
    without = ff.plan(replace(SHAPE, mixer="test-no-cost"), **job)
    assert "has no cost()" in " ".join(without.plan.notes)
    assert found.estimate is not None and without.estimate is not None
    assert found.estimate.memory["activations"] > without.estimate.memory["activations"]
    assert found.estimate.parts["attention"] > without.estimate.parts["attention"]
    assert layer_flops(SHAPE, 0, 2048).scores == 4 * (EXAMPLE.CHUNK + 8) * 64


class WithoutCost(EXAMPLE.GatedScan, name="test-no-cost"):
    """The example without figures for planning."""

    def cost(self, shape: ff.Shape, seq: int) -> None:
        return None


@pytest.mark.parametrize("head_dim", [8, 6])
def test_context_ranks_have_whole_heads_of_any_width(head_dim: int) -> None:
    """One of four heads each, of a width that they need not divide; their messages are priced."""
    model = with_mixer("gated-scan", head_dim=head_dim)
    plan = resolve(PlanOptions(model, layout="cp=4", context="ulysses", seq=32, microbatches=1))
    assert not judged(plan, [rehearse_rank(plan, 1, None)], {}).astray
