"""From names and files to `Shape`: presets, Hugging Face configs, `--set key=value`, small copies.

Presets are TOML, one file per family; a file's `[defaults]` apply to each of its models. A preset
may leave out `kv_heads` (as many as heads) and `head_dim` (an even share of the width).
`scale_down` shrinks a large model for a laptop; its legal layouts stay legal.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.core import BadFile, FivefoldError, UnknownName, is_code, load_code, tables
from fivefold.core.model.hf_config import shape_from_config
from fivefold.core.model.mixers import Hybrid, Mixer
from fivefold.core.model.shape import Mla, Moe, Rope, Shape, parameters

if TYPE_CHECKING:
    from fivefold.core.layout import Layout

PRESETS = Path(__file__).parents[2] / "presets" / "models"
# Model names are the quoted table headers; finding them needs no TOML parser, which is slow.
HEADER = re.compile(r'^\["([^"]+)"\]', re.MULTILINE)
LARGEST_CONFIG = 1_000_000  # bytes; real ones have a few thousand
PASTED = "pasted config"  # the name of a model that came as text
_OWN = "fivefold_shape"  # the only key of a text that has our own keys, not Hugging Face's
NESTED: dict[str, type] = {"rope": Rope, "hybrid": Hybrid, "mla": Mla, "moe": Moe}


def presets() -> tuple[str, ...]:
    """The names of all model presets, sorted."""
    return tuple(sorted(_files_by_name()))


def load(name_or_path: str) -> Shape:
    """A preset by name, the Hugging Face `config.json` at a path (or in a directory), or the text
    of such a file, which starts with a brace.

    Case, `-`, `_` and spaces do not matter: `GPT-2` is `gpt2`. A preset is preferred to a file of
    the same name; write `./name` for the file.
    """
    if not name_or_path.strip():
        raise FivefoldError(
            "no model: give a preset name, such as llama-3.1-8b, or the path of a config.json"
        )
    if is_text(name_or_path):
        return of_text(name_or_path)
    files = _files_by_name()
    name = _spelled(name_or_path, files)
    if name is not None:
        return _preset(name, files[name])
    path = Path(name_or_path)
    if _is_path(path):
        if path.suffix != ".json" and not path.exists() and (near := _near_preset(path.name)):
            raise BadFile(name_or_path, [f"no such file; for the preset say {near}"])
        return _config(path)
    raise UnknownName("model", name_or_path, files)


def is_hub_name(text: str) -> bool:
    """Whether this may be OWNER/NAME of the Hugging Face hub, and is no path of a file or run."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", text) is not None
    return is_name and not re.search(r"\.[a-z]+$", text) and not Path(text).parent.exists()


def hub_hint(name: str) -> str:
    """How to use a model of the hub: nothing is downloaded from there."""
    folder = name.split("/")[1]
    near = _near_preset(folder)
    preset = f"; its preset is {near}" if near else ""
    return (
        f"for a model of the Hugging Face hub, download it (hf download {name} --local-dir "
        f"{folder}) and give ./{folder}, or make a run of it: fivefold import {folder}{preset}"
    )


def _near_preset(text: str) -> str | None:
    """The preset with the longest name that a name begins with, or one that is spelt alike."""
    files, name = _files_by_name(), text.lower().removeprefix("meta-")
    begun = [name_start for name_start in files if name.startswith(name_start)]
    alike = difflib.get_close_matches(name, files, n=1, cutoff=0.85)
    return max(begun, key=len, default=next(iter(alike), None))


def preset_name(text: str) -> str:
    """The name of the preset that a text means; no file is read."""
    files = _files_by_name()
    name = _spelled(text, files)
    if name is None:
        raise UnknownName("model", text, files)
    return name


def is_preset(text: str) -> bool:
    """Whether this means a preset, and not a file."""
    return _spelled(text, _files_by_name()) is not None


def is_text(text: str) -> bool:
    """Whether this is the text of a config, and neither a name nor a path."""
    return text.lstrip().startswith("{")


def of_text(text: str) -> Shape:
    """The model of a pasted Hugging Face config, or of a text that `to_text` wrote."""
    shape = _read(text.encode(), PASTED)
    return shape if _OWN in text else dataclasses.replace(shape, name=PASTED)


def to_text(shape: Shape) -> str:
    """A shape as a text that `load` reads back, so that a plan file can have it. What learns is
    left out: it belongs to the plan."""
    return json.dumps({_OWN: tables.table_of(replace(shape, tuning=None))})


def config_text(config: Mapping[str, Any]) -> str:
    """A Hugging Face config as a text that `load` reads."""
    try:
        return json.dumps(dict(config))
    except (TypeError, ValueError) as error:
        raise BadFile("the config", [f"{error}; give what json.load reads"]) from error


def with_overrides(shape: Shape, overrides: Mapping[str, str]) -> Shape:
    """Apply `--set key=value` texts; nested keys have a dot (`moe.experts`), `none` unsets.

    Derived keys are derived again unless they are set: `head_dim` if it was width / heads or
    follows from MLA, `kv_heads` if it equalled heads, and `moe.shared_ffn`, which follows
    `moe.shared`, and also `moe.ffn` if a shared expert was as wide as another.
    """
    if not overrides:
        return shape
    table = tables.table_of(shape)
    problems: list[str] = []
    for key, text in overrides.items():
        if key not in (hints := keys()):
            raise UnknownName("model key", key, hints)
        hint = hints[key]
        try:
            value = mixer_name(text) if key == "mixer" else tables.from_text(hint, text, key)
            _put(table, key, value)
        except ValueError as error:
            problems.append(f"{key} = {text!r}: {error}")
    if problems:
        raise BadFile("--set", problems)
    _derive(shape, table, set(overrides))
    try:
        return tables.build(Shape, table, "--set")
    except BadFile as error:
        # Name the keys once, not as a message within a message.
        inner = error.__cause__
        problems = inner.problems if isinstance(inner, BadFile) else error.problems
        raise BadFile("--set", problems) from error


@functools.lru_cache
def _files_by_name() -> dict[str, Path]:
    files = sorted(PRESETS.glob("*.toml"))
    return {name: path for path in files for name in HEADER.findall(path.read_text("utf-8"))}


def _spelled(text: str, names: Iterable[str]) -> str | None:
    """The name of which a text is another spelling."""
    plain = _plain(text)
    return next((name for name in names if _plain(name) == plain), None)


def _plain(name: str) -> str:
    # Dots stay: qwen2-57b and qwen2.5-7b are two models.
    return re.sub(r"[-_ ]", "", name.lower())


@functools.lru_cache
def _preset(name: str, path: Path) -> Shape:
    presets = tables.read_toml(path)
    table: dict[str, Any] = {"name": name, **presets.get("defaults", {}), **presets[name]}
    table.setdefault("kv_heads", table["heads"])
    table.setdefault("head_dim", table["width"] // table["heads"])
    return tables.build(Shape, table, f"preset {name}")


def _is_path(path: Path) -> bool:
    if path.suffix == ".json" or len(path.parts) > 1:
        return True
    try:
        return path.exists()
    except OSError:  # a name too long for a file
        return False


def text_of(path: str) -> str:
    """The text of the config at a path, or in a directory."""
    return _bytes(Path(path)).decode("utf-8", "replace")


def _bytes(path: Path) -> bytes:
    try:
        path = path / "config.json" if path.is_dir() else path
        with path.open("rb") as file:
            return file.read(LARGEST_CONFIG + 1)
    except OSError as error:
        folder = path.parent
        if path.name == "config.json" and (folder / "plan.toml").is_file():
            raise BadFile(
                str(folder), [f"is a run, not a model: give {folder}/plan.toml"]
            ) from error
        raise BadFile(str(path), [f"{error.strerror}; check the path"]) from error


def _config(path: Path) -> Shape:
    path = path / "config.json" if path.is_dir() else path
    shape = _read(_bytes(path), str(path))
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return dataclasses.replace(shape, name=name)


@functools.lru_cache(maxsize=8)
def _read(data: bytes, where: str) -> Shape:
    """The bytes of a config."""
    if len(data) > LARGEST_CONFIG:
        raise BadFile(where, ["larger than 1 MB: give a Hugging Face config.json"])
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFile(where, [f"not valid JSON: {error}; fix it"]) from error
    if not isinstance(config, dict):
        raise BadFile(where, ["must hold one JSON object, a Hugging Face config"])
    table = typing.cast("dict[str, Any]", config)
    if _OWN in table:
        return tables.build(Shape, table[_OWN], where)
    return shape_from_config(table, where)


@functools.cache
def keys() -> Mapping[str, object]:
    """The keys of a model that can be set, with their types: those of Shape, and those under
    `rope.`, `hybrid.`, `mla.` and `moe.`."""
    hints: dict[str, object] = dict(tables.types_of(Shape))
    del hints["tuning"]  # has keys of its own in `[train]`
    for name, cls in NESTED.items():
        hints |= {f"{name}.{inner}": hint for inner, hint in tables.types_of(cls).items()}
    return hints


def _put(table: dict[str, Any], key: str, value: object) -> None:
    outer, _, inner = key.rpartition(".")
    inside = table.setdefault(outer, {}) if outer else table
    if value is None:
        inside.pop(inner, None)
    else:
        inside[inner] = value


def _derive(shape: Shape, table: dict[str, Any], keys: set[str]) -> None:
    width, heads = table["width"], table["heads"]
    if "kv_heads" not in keys and shape.kv_heads == shape.heads:
        table["kv_heads"] = heads
    if "head_dim" not in keys and "mla" in table:
        table["head_dim"] = table["mla"].get("nope_dim", 0) + table["mla"].get("rope_dim", 0)
    elif "head_dim" not in keys and shape.head_dim * shape.heads == shape.width and heads > 0:
        if width % heads:
            rule = f"width = {width} is no multiple of heads = {heads}: set head_dim too"
            raise BadFile("--set", [rule])
        table["head_dim"] = width // heads
    moe = shape.moe
    if "moe.shared_ffn" not in keys and moe is not None and moe.shared and "moe" in table:
        share = moe.shared_ffn // moe.shared
        ffn = table["moe"]["ffn"] if share == moe.ffn else share
        table["moe"]["shared_ffn"] = table["moe"]["shared"] * ffn


LARGEST = 4_000_000  # parameters up to which a model is verified as it is
_LAYERS = 4
_WIDTH = 64
_LEAST_FFN = 96
_LEAST_VOCAB = 192
_EXPERT_FFN = 32
_WINDOW = 20  # shorter than the shortest verified sequence, so that it has an effect; longrope too
_MAX_SEQ = 2048


def is_large(shape: Shape) -> bool:
    """Whether a model is too large to verify on a laptop."""
    return parameters(shape).total > LARGEST


def scale_down(shape: Shape, layout: Layout) -> Shape:
    """The model with fewer layers and a smaller width, and with all heads.

    A tp that divides the heads divides the MLP width and vocabulary of the small model exactly if
    it divides those of the large one.
    """
    heads = shape.heads
    common = math.gcd(shape.ffn, heads)
    ffn = next(
        common * n for n in count(-(-_LEAST_FFN // common)) if math.gcd(common * n, heads) == common
    )
    head_dim = 8 if heads <= 32 else 4
    mla = None if shape.mla is None else _latents(shape.mla, head_dim)
    share = (shape.rotary_dim or 0) / shape.head_dim
    rotary_dim = 2 * max(1, round(share * head_dim / 2)) if share else None
    rotated = (rotary_dim or head_dim) if mla is None else mla.rope_dim
    return replace(
        shape,
        layers=min(shape.layers, max(_LAYERS, layout.pp * layout.chunks)),
        width=_WIDTH,
        head_dim=head_dim if mla is None else mla.nope_dim + mla.rope_dim,
        mla=mla,
        moe=None if shape.moe is None else _experts(shape.moe, layout),
        ffn=ffn,
        vocab=-(-_LEAST_VOCAB // heads) * heads + shape.vocab % heads,
        max_seq=min(shape.max_seq, _MAX_SEQ),
        rotary_dim=rotary_dim,
        rope=None if shape.rope is None else _rope(shape.rope, rotated // 2),
        window=None if shape.window is None else min(shape.window, _WINDOW),
    )


def _rope(rope: Rope, pairs: int) -> Rope:
    """Of heads with fewer pairs. All sequences outgrow longrope, and not all documents."""
    if rope.kind != "longrope":
        return rope
    short, long = (
        tuple(factors[i * len(factors) // pairs] for i in range(pairs))
        for factors in (rope.short, rope.long)
    )
    return replace(rope, original_seq=min(rope.original_seq, _WINDOW), short=short, long=long)


def _latents(mla: Mla, head_dim: int) -> Mla:
    q_rank = None if mla.q_rank is None else _WIDTH // 2
    return Mla(_WIDTH // 4, nope_dim=head_dim, rope_dim=4, value_dim=head_dim, q_rank=q_rank)


def _experts(moe: Moe, layout: Layout) -> Moe:
    """Fewer and narrower experts, with the same top_k and groups; ep and etp still divide them."""
    step = math.lcm(moe.groups, layout.ep)
    fewest = max(2 * moe.top_k, moe.groups * -(-moe.top_k // moe.groups_kept))
    shared_ffn = math.lcm(layout.tp, _EXPERT_FFN) if moe.shared else 0
    return replace(
        moe,
        experts=min(moe.experts, -(-fewest // step) * step),
        ffn=math.lcm(layout.etp, _EXPERT_FFN),
        shared_ffn=shared_ffn,
        first_dense=min(moe.first_dense, 1),
    )


def scaling_note(full: Shape, small: Shape) -> str:
    """A sentence that says what was changed."""
    return (
        f"{full.name} is verified scaled down: {small.layers} of {full.layers} layers, width "
        f"{small.width} for {full.width}, heads of {small.head_dim} for {full.head_dim}, MLP width "
        f"{small.ffn} for {full.ffn}, vocabulary {small.vocab} for {full.vocab}; heads "
        f"({small.heads}, KV {small.kv_heads}) and divisibility by tp are the same"
        + ("" if full.moe is None or small.moe is None else _experts_note(full.moe, small.moe))
    )


def _experts_note(full: Moe, small: Moe) -> str:
    return (
        f"; {small.experts} experts for {full.experts}, of width {small.ffn} for {full.ffn}, "
        f"{small.top_k} for a token as before"
    )


def mixer_name(text: str) -> str:
    """The name of a mixer that is given by its name, or as `FILE.py:NAME`, which loads it."""
    if not is_code(text):
        return text
    mixer = load_code(text)
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer) and mixer.name):
        raise BadFile(text, ['a mixer is a class with a name: class X(ff.Mixer, name="x")'])
    return mixer.name
