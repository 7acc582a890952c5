"""The list of keys that a config may have: what readers ask for, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold import cli
from fivefold.core.errors import BadFile, UnknownName
from fivefold.core.model.hf_config import (
    FAMILIES,
    known_keys,
    shape_from_config,
)
from fivefold.core.tables import Config
from tests.raw_configs import CONFIGS, newer

UNKNOWN = "not known here"
LITERALS = ("true", "false", "0", "1", "{}")


def read_paths(config: Config) -> set[str]:
    """The paths of all keys that the reader of a config asked for."""
    own = {config._prefix + key for key in config._read}
    return own.union(*map(read_paths, config._nested.values()))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_list_has_every_key_that_is_read_of_a_published_config(name: str) -> None:
    for raw in (CONFIGS[name], newer(CONFIGS[name])):
        config = Config(raw, [])
        FAMILIES[raw["model_type"]](config)
        assert not read_paths(config).isdisjoint({"hidden_size", "n_embd"})
        assert read_paths(config) <= known_keys(raw["model_type"]).keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_of_the_list_is_unknown(name: str) -> None:
    """Its value may be wrong, or of a kind that does without, but never the key."""
    raw = CONFIGS[name]
    for key, kind in known_keys(raw["model_type"]).items():
        value = json.loads(kind) if kind in LITERALS else "?"
        if "." not in key:
            try:
                shape_from_config(raw | {key: value}, name)
            except BadFile as error:
                assert UNKNOWN not in str(error), key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kind_is_what_the_reader_takes(family: str) -> None:
    """A value of another kind is a problem of this key."""
    wrong = {"true or false": "?", "table": "?", "list": "?", "number": "?"}
    for key, kind in known_keys(family).items():
        value = wrong.get(kind, "?" if kind.startswith("whole number") else None)
        if value is None or "." in key:
            continue
        problems: list[str] = []
        published = [raw for raw in CONFIGS.values() if raw["model_type"] == family]
        for base in ({}, {"use_sliding_window": True}, *published):
            FAMILIES[family](Config({**base, key: value}, problems))
        assert any(problem.startswith(f"{key} = '?'") for problem in problems), (key, kind)


def test_features_that_are_off_pass_at_their_value_alone() -> None:
    raw = CONFIGS["gpt2"]
    shape, off = shape_from_config(raw, "gpt2"), 0
    for key, kind in known_keys("gpt2").items():
        if key in raw or kind not in LITERALS:
            continue
        assert shape_from_config(raw | {key: json.loads(kind)}, "gpt2") == shape, key
        with pytest.raises(BadFile, match=f"{key} = 3: "):
            shape_from_config(raw | {key: 3}, "gpt2")
        off += 1
    assert off > 20


def test_a_refusal_names_the_key_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    raw = CONFIGS["llama"] | {"attention_twist": 3}
    with pytest.raises(BadFile) as caught:
        shape_from_config(raw, "llama")
    first, second = caught.value.problems
    assert first.startswith("attention_twist = 3: not known here")
    command = second.partition(": fivefold ")[2]
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(key in printed for key in ("rope_scaling.low_freq_factor", "rms_norm_eps", "alibi"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refusal_of_a_sound_config_names_no_command(family: str) -> None:
    with pytest.raises(BadFile) as caught:
        shape_from_config({"model_type": family}, "empty")
    assert "--keys" not in str(caught.value) and "is missing" in str(caught.value)


def test_an_unknown_family_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UnknownName, match=r"did you mean qwen2_moe"):
        known_keys("qwen2-moe")
    for words, message in (
        (["import", "lama", "--keys"], "did you mean llama?"),
        (["import", "llama", "--keys", "-o", str(tmp_path)], "leave the other options out"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
