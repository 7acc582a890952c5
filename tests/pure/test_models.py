"""Names, files, overrides and refusals on the way to a Shape."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core import tables
from fivefold.core.errors import BadFile, FivefoldError, UnknownName
from fivefold.core.model.presets import load, presets, with_overrides
from fivefold.core.model.shape import Moe, Shape, parameters, training_flops


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("gpt-2", "gpt2"),
        ("GPT2", "gpt2"),
        ("gpt-3-175b", "gpt3-175b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-405B", "llama-3.1-405b"),
        ("Qwen3_235B_A22B", "qwen3-235b-a22b"),
        ("qwen2.5-7b", "qwen2.5-7b"),
    ],
)
def test_spellings(said: str, meant: str) -> None:
    assert load(said).name == meant


def test_names_stay_apart_when_written_together() -> None:
    plain = {name.replace("-", "") for name in presets()}
    assert len(plain) == len(presets())


def test_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"did you mean llama-3\.1-405b"):
        load("llama-3.1-406b")


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_a_source_and_survives_its_own_table(name: str) -> None:
    shape = load(name)
    assert shape.source
    again = tables.build(Shape, tables.table_of(shape), name)
    assert again == shape and again.name == name


@pytest.mark.nightly
def test_loading_is_fast() -> None:
    load("tiny")
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        load("deepseek-v3")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.03


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="check the path"):
        load(str(tmp_path / "config.json"))
    with pytest.raises(BadFile, match="check the path"):
        load(str(tmp_path))
    for text in ("{", "[" * 100_000, '"\\ud800', "1" * 5000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadFile, match="config"):
            load(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadFile, match="one JSON object"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text(" " * 1_000_001)
    with pytest.raises(BadFile, match="larger than 1 MB"):
        load(str(tmp_path))
    with pytest.raises(UnknownName):
        load("x" * 5000)


# Overrides


def test_overrides_of_the_issue() -> None:
    texts = {"kv_heads": "1", "vocab": "251", "tied": "true", "window": "16", "layers": "4"}
    shape = with_overrides(load("tiny"), texts)
    wanted = {"kv_heads": 1, "vocab": 251, "tied": True, "window": 16, "layers": 4}
    assert shape == dataclasses.replace(load("tiny"), **wanted)
    assert shape.name == "tiny"


def test_overrides_inside_tables_and_back_to_none() -> None:
    shape = with_overrides(load("tiny-moe"), {"moe.experts": "16", "moe.score": "sigmoid"})
    assert shape.moe is not None and (shape.moe.experts, shape.moe.score) == (16, "sigmoid")
    dense = with_overrides(load("tiny-moe"), {"moe": "none"})
    assert dense == load("tiny")
    assert with_overrides(load("mistral-7b"), {"window": "none"}).window is None
    routed = {"moe.experts": "4", "moe.top_k": "1", "moe.ffn": "32"}
    assert with_overrides(load("tiny"), routed).moe == Moe(experts=4, top_k=1, ffn=32)


def test_overrides_keep_what_was_derived() -> None:
    wide = with_overrides(load("tiny"), {"width": "128"})
    assert (wide.width, wide.head_dim, wide.kv_heads) == (128, 16, 4)
    assert with_overrides(load("tiny"), {"width": "128", "head_dim": "8"}).head_dim == 8
    assert with_overrides(load("qwen3-0.6b"), {"width": "512"}).head_dim == 128
    gpt2 = with_overrides(load("gpt2"), {"heads": "6"})
    assert (gpt2.kv_heads, gpt2.head_dim) == (6, 128)
    latent = with_overrides(load("deepseek-v3"), {"mla.rope_dim": "32", "heads": "8"})
    assert (latent.head_dim, latent.kv_heads) == (160, 8)
    shared = with_overrides(load("deepseek-v2"), {"moe.ffn": "100", "moe.shared": "3"})
    assert shared.moe is not None and shared.moe.shared_ffn == 300
    qwen = with_overrides(load("qwen2-57b-a14b"), {"moe.ffn": "100"})
    assert qwen.moe is not None and qwen.moe.shared_ffn == 20480


def test_unknown_override_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean kv_heads"):
        with_overrides(load("tiny"), {"kvheads": "2"})
    with pytest.raises(UnknownName, match=r"did you mean moe\.experts"):
        with_overrides(load("tiny-moe"), {"moe.expert": "2"})


def test_wrong_overrides_are_all_reported() -> None:
    texts = {"layers": "four", "tied": "yes", "norm_eps": "small", "vocab": "1e-9", "moe": "8"}
    with pytest.raises(BadFile) as caught:
        with_overrides(load("tiny"), texts)
    assert len(caught.value.problems) == 5
    with pytest.raises(BadFile) as caught:
        with_overrides(load("tiny"), {"kv_heads": "3", "dropout": "1"})
    assert len(caught.value.problems) == 2
    with pytest.raises(BadFile, match="did you mean sigmoid"):
        with_overrides(load("tiny-moe"), {"moe.score": "sigmoit"})
    with pytest.raises(BadFile, match="set head_dim too"):
        with_overrides(load("tiny"), {"width": "100"})
    with pytest.raises(BadFile, match=r"missing key 'moe\.top_k'"):
        with_overrides(load("tiny"), {"moe.experts": "8"})


@settings(max_examples=60)
@given(
    key=st.sampled_from(
        ["layers", "heads", "kv_heads", "window", "rope_theta", "moe.top_k", "mtp"]
    ),
    text=st.one_of(st.integers(-3, 10**13).map(str), st.floats().map(str), st.text(max_size=5)),
)
def test_no_override_escapes_the_error_tree(key: str, text: str) -> None:
    try:
        shape = with_overrides(load("tiny-moe"), {key: text})
    except FivefoldError:
        return
    assert parameters(shape).total > 0 and training_flops(shape, 64).total > 0


# Refusals


def test_every_problem_at_once() -> None:
    with pytest.raises(FivefoldError) as caught:
        dataclasses.replace(load("tiny"), layers=0, width=-1, vocab=10**10, rope_theta=float("nan"))
    message = str(caught.value)
    assert all(name in message for name in ("layers = 0", "width = -1", "vocab", "rope_theta"))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"kv_heads": 3}, "no multiple of kv_heads"),
        ({"head_dim": 7}, "even"),
        ({"layers": 10**12}, "layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"moe": Moe(experts=4, top_k=5, ffn=8)}, "exceeds moe.experts"),
        ({"moe": Moe(experts=4, top_k=2, ffn=8, first_dense=8)}, "no layer has experts"),
        ({"moe": Moe(experts=4, top_k=2, ffn=8, shared=1)}, "both or neither"),
        ({"moe": Moe(experts=6, top_k=2, ffn=8, groups=4)}, "does not divide"),
        ({"moe": Moe(experts=8, top_k=3, ffn=8, groups=4)}, "groups of 2"),
        ({"moe": Moe(experts=8, top_k=2, ffn=8, groups=2, groups_kept=3)}, "groups_kept"),
        ({"moe": Moe(experts=8, top_k=2, ffn=0, every=0)}, r"moe\.ffn = 0"),
    ],
)
def test_contradictions(change: dict[str, object], rule: str) -> None:
    with pytest.raises(FivefoldError, match=rule):
        dataclasses.replace(load("tiny"), **change)


def test_latent_attention_keeps_its_widths() -> None:
    with pytest.raises(FivefoldError, match="nope_dim"):
        dataclasses.replace(load("deepseek-v3"), head_dim=128, kv_heads=8)
