"""`fivefold train` as a person starts it, and its files beside what the judge computes."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import (
    load,  # pyright: ignore[reportUnknownVariableType], torch leaves a type open
)

from tests.commands import in_fork
from tests.judge.decoder import Model
from tests.judge.trainer import Trained, Trainer

Plant = Callable[[], AbstractContextManager[Any]]
Table = dict[str, Any]
# In float64 the gradients of a step differ by 8 · eps · √(layers · longest sum) = 3e-14 of the
# largest, and AdamW answers with at most lr / eps = 1e3 times that in each of at most 12 steps.
EXACT = 1e-9
# In narrower dtypes what a step shows differs by a few roundings. Single weights differ by whole
# steps of AdamW where their gradient is rounding error, and are not compared.
ROUNDINGS = 4
SIZES: Table = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 64}
EXPERTS: Table = {"moe.experts": 4, "moe.ffn": 8, "moe.shared_ffn": 8}
STEPS = 6


@dataclass(frozen=True)
class Case:
    """A training: keys of the plan, of the model and of `[train]`, and the words of each start.

    `first` is what happens to the first of several starts, which then fails. `ends` is the exit
    code of the last one.
    """

    name: str
    layout: str = "dp=1"
    plan: Table = field(default_factory=Table)
    model: Table = field(default_factory=Table)
    train: Table = field(default_factory=Table)
    dtype: str = "float64"
    starts: tuple[str, ...] = ("",)
    first: Plant | None = None
    ends: int = 0

    def __str__(self) -> str:
        return self.name

    def exit_code(self, start: int) -> int:
        """Of one of the starts, as it should be."""
        if start == len(self.starts) - 1:
            return self.ends
        return 0 if self.first is None else 1

    def table(self, corpora: Path) -> Table:
        """The plan file; names of corpora in `data` become folders."""
        experts = any(key.startswith("moe.") for key in self.model)
        sizes = {**SIZES, **(EXPERTS if experts else {}), **self.model}
        train: Table = {"steps": STEPS, "eval_every": 3, "lr": 1e-2, "data": "{long}", **self.train}
        folders = {each.name: each for each in corpora.iterdir()}
        train = {key: value for key, value in train.items() if value is not None}
        if "data" in train:
            train["data"] = train["data"].format(**folders)
        usual = {"model": "tiny-moe" if experts else "tiny", "seq": 12, "batch": 8}
        plan = {**usual, "microbatch_size": 2, "layout": self.layout, **self.plan}
        return {**plan, "set": sizes, "train": train}

    def judged(self, corpora: Path) -> Trained:
        """What the judge computes."""
        table = self.table(corpora)
        return _judged(json.dumps(table), self.dtype)


@cache
def _judged(plan: str, dtype: str) -> Trained:
    table: Table = json.loads(plan)
    said = table["set"]
    names = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "tied")
    names += ("dropout", "attention_dropout")
    sizes = {name: said[name] for name in names if name in said}
    if "moe.experts" in said:
        sizes |= {"experts": said["moe.experts"], "expert_ffn": said["moe.ffn"]}
        sizes |= {"shared_ffn": said["moe.shared_ffn"], "biased": said.get("moe.bias", False)}
    return Trainer(table, Model(**sizes), getattr(torch, dtype)).run()


def write_corpora(folder: Path) -> Path:
    """Three folders of tokens: documents of random lengths over sixteen letters, in shards."""
    random = np.random.default_rng(7)
    for name, num_tokens in (("long", 18_000), ("short", 500), ("other", 2_000)):
        lines, left = list[str](), num_tokens
        while left > 0:
            size = min(left, int(random.integers(3, 40)))
            letters = random.choice(16, size, p=np.arange(1, 17) / 136)
            lines.append(json.dumps({"text": "".join(chr(48 + each) for each in letters)}))
            left -= size
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        words = f"tokens {name}.jsonl -o corpora/{name} --end none --shard-tokens {num_tokens // 3}"
        done = in_fork(words.split(), folder)
        assert done.returncode == 0, done.stderr
    return folder / "corpora"


def to_toml(table: Mapping[str, Any]) -> str:
    """The keys of the plan, then those of its two tables."""
    lines = [f"{key} = {json.dumps(table[key])}" for key in table if key not in ("set", "train")]
    for name in ("set", "train"):
        inner: Table = table[name]
        lines += [f"[{name}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in inner.items())]
    return "\n".join(lines) + "\n"


def errors(case: Case, corpora: Path, folder: Path, plant: Plant = nullcontext) -> dict[str, float]:
    """How far a run is from the judge, by quantity; `plant` puts a mistake into all its ranks."""
    folder.mkdir()
    (folder / "plan.toml").write_text(to_toml(case.table(corpora)))
    for number, words in enumerate(case.starts):
        with plant(), case.first() if number == 0 and case.first else nullcontext():
            command = f"train plan.toml --out run --dtype {case.dtype} {words}"
            done = in_fork(_split(command), folder)
        if done.returncode != case.exit_code(number):
            return {f"exit code {done.returncode}: {done.stderr.strip()[-500:]}": math.inf}
    return dict(_errors(folder / "run", case.judged(corpora)))


def _split(command: str) -> list[str]:
    """Words; one that follows --layout may have degrees joined by commas."""
    return [word.replace(",", " ") for word in command.split()]


def _errors(run: Path, judged: Trained) -> Iterator[tuple[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: {**line, "skipped": bool(line["skipped"])} for line in lines}
    yield "steps", 0.0 if [*found] == [*range(1, len(judged.steps) + 1)] else math.inf
    pairs = [(found.get(i, {}), shown) for i, shown in enumerate(judged.steps, start=1)]
    for key in judged.steps[0]:
        used = [(a.get(key), b[key]) for a, b in pairs if not (b["skipped"] and key in _UNKNOWN)]
        yield key, max((_relative(a, b) for a, b in used), default=0.0)
    newest = max((run / "checkpoints").glob("step-*[0-9]"), default=None)
    if newest is None:
        return
    facts: Table = json.loads((newest / "manifest.json").read_text())["facts"]
    for key, value in judged.facts.items():
        yield f"facts {key}", 0.0 if facts[key] == value else math.inf
    yield from _tensor_errors(read_checkpoint(newest), judged)


TENSORS: tuple[str, ...] = ("model", "optim", "balance")
_UNKNOWN = ("loss", "norm", "fullest")  # of a step that was skipped


def _relative(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if math.isnan(a) or math.isnan(b):
        return math.inf
    return abs(a - b) / max(abs(b), 1e-30)


def _tensor_errors(tensors: Mapping[str, Tensor], judged: Trained) -> Iterator[tuple[str, float]]:
    wanted = {f"model/{name}": one for name, one in judged.weights.items()}
    for layer, bias in judged.biases.items():
        wanted[f"model/blocks.{layer}.mlp.router.bias"] = bias
    wanted |= {f"balance/load/{layer}": load for layer, load in judged.loads.items()}
    for key, states in judged.states.items():
        wanted |= {f"optim/{key}/{name}": one for name, one in states.items()}
    kinds: dict[str, float] = dict.fromkeys(TENSORS, 0.0)
    kinds["tensors"] = 0.0 if tensors.keys() == wanted.keys() else math.inf
    for key in tensors.keys() & wanted.keys():
        a, b = tensors[key].double(), wanted[key].double()
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))
        kind = key.split("/")[0]
        kinds[kind] = max(kinds[kind], error if error == error else math.inf)
    yield from kinds.items()


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors, by torch's own reader."""
    reader = FileSystemReader(folder)
    tensors: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def differing(case: Case, found: Mapping[str, float]) -> dict[str, float]:
    """What is further from the judge than rounding explains."""
    exact = case.dtype == "float64"
    tolerance = EXACT if exact else ROUNDINGS * torch.finfo(getattr(torch, case.dtype)).eps
    compared = {key: error for key, error in found.items() if exact or key not in TENSORS}
    return {key: error for key, error in compared.items() if not error <= tolerance}
