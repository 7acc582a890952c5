"""Measured runs from JSONL files, one JSON object per line, or from TOML files, one table `[[run]]`
per run, with the fields below.

A row is priced by what it says. Its tables `shape` and `software` say what the other fields cannot:
latents, shared experts and dense layers, and how the software ran. They are read strictly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from fivefold.core import BadFile, FivefoldError, did_you_mean, problems_of, read_toml
from fivefold.core.layout import Scaling
from fivefold.core.model import Shape
from fivefold.core.model import presets as models

Row = Mapping[str, Any]
_MOST_PROBLEMS = 12  # that are listed


class RowField(NamedTuple):
    """One key of a row; a needed key must be there, but may be null (unknown)."""

    kind: str
    needed: bool
    meaning: str


FIELDS = {
    "id": RowField("text", True, "unique; its head names the family of rows"),
    "stack": RowField("text", False, "the software, a name of `fivefold plan --set stack=NAME`"),
    "model": RowField("text", True, "the model's name"),
    "layers": RowField("number", True, "transformer layers"),
    "hidden": RowField("number", True, "width of the model"),
    "ffn_hidden": RowField("number", False, "width inside the MLP, or inside one expert"),
    "heads": RowField("number", True, "attention heads"),
    "kv_heads": RowField("number", False, "heads of keys and values; null: as many as heads"),
    "head_dim": RowField("number", False, "width of a head; null: hidden over heads"),
    "activation": RowField("text", False, "`swiglu`, `geglu`, `gelu`, `relu`; null: by params_b"),
    "tied": RowField("flag", False, "whether the head is the embedding; null: by params_b"),
    "params_b": RowField("number", False, "billions of parameters; tells activation and tied"),
    "vocab": RowField("number", False, "words of the vocabulary"),
    "experts": RowField("number", False, "experts of a layer; null or left out: dense"),
    "topk": RowField("number", False, "experts that a token visits"),
    "seq_len": RowField("number", True, "tokens of a sequence"),
    "gpu": RowField("text", True, "which GPU, such as `a100-80g` or `h100-sxm`"),
    "gpus": RowField("number", True, "how many"),
    "gpus_per_node": RowField("number", False, "compared with the machine's"),
    "interconnect": RowField("text", False, "the network in words, such as `8x400 Gb/s per node`"),
    "network_gb_s": RowField("number", False, "bytes/s of a GPU's network, one way, over 1e9"),
    "precision": RowField("text", False, "`bf16`, `fp16`, `fp32`, `fp8`, `mxfp8`, `nvfp4`"),
    "frozen": RowField("flag", False, "whether the model's own weights do not learn"),
    "lora_rank": RowField("number", False, "of adapters beside frozen weights; null: none"),
    "offload_activations": RowField("number", False, "share of them on the host; null: 0"),
    "dp": RowField("number", True, "data ranks"),
    "zero": RowField("number", False, "ZeRO stage, 0 to 3"),
    "tp": RowField("number", True, "tensor ranks"),
    "sp": RowField("flag", False, "sequence parallelism beside tp"),
    "cp": RowField("number", False, "context ranks; null: 1"),
    "pp": RowField("number", True, "pipeline ranks"),
    "vpp": RowField("number", False, "chunks of layers a pipeline rank holds; null: 1"),
    "schedule": RowField("text", False, "`interleaved-1f1b`, `zb1p`, `zb2p`, or one of ours"),
    "ep": RowField("number", False, "expert ranks; null: 1"),
    "etp": RowField("number", False, "tensor ranks inside experts; null: 1"),
    "micro_batch": RowField("number", True, "sequences of a microbatch; null gives an interval"),
    "global_batch": RowField("number", True, "sequences of a step"),
    "recompute": RowField("text", True, "`none`, `selective`, `full`; null gives an interval"),
    "shape": RowField(
        "table",
        False,
        "what else the model has: `mla` (latents: `kv_rank`, `q_rank`, `nope_dim`, `rope_dim`, "
        "`value_dim`), `moe` (`shared`, `shared_ffn`, `first_dense`, …), `ffn` of dense layers, "
        "`mtp`, any key of a model; `base`: a preset for all others. Its name steers nothing then",
    ),
    "software": RowField(
        "table",
        False,
        "how the stack ran: `compile` and `cuda_graphs` (flags), `fp8` (granularity: `tensorwise`, "
        "`blockwise`, `mxfp8`, `nvfp4`), `overlap` (`dp`, `pp`: flags; `tp`, `ep`: hidden shares)",
    ),
    "achieved": RowField("table", True, "what was measured, below"),
    "extra": RowField("table", False, "what only one source tells, such as `zero_group`"),
    "source": RowField("text", False, "where it was published; steers nothing"),
    "notes": RowField("text", False, "what else the source says of the run; steers nothing"),
    "norm": RowField("table", False, "its figures in one convention; steers nothing"),
    "flops_convention": RowField("text", False, "how its FLOPs were counted; steers nothing"),
    "confidence": RowField("text", False, "how sure its figures are; steers nothing"),
    "fully_specified": RowField("flag", False, "whether the source leaves nothing open"),
}
EXTRA = {
    "zero_group": RowField("number", False, "data ranks that shard the states"),
    **{
        name: RowField("any", False, "steers nothing")
        for name in (
            *("job_id", "after_pp_fix", "throughput_noise", "allreduce_GBps", "allgather_GBps"),
            *("reducescatter_GBps", "ar_intranode_GBps"),
        )
    },
}


@dataclass(frozen=True)
class RowOverlap:
    """Which communication overlaps with compute; None: as the stack does."""

    dp: bool | None = None  # gradients and gathers of the data axis
    tp: float | None = None  # share of tensor-parallel traffic
    ep: float | None = None  # share of dispatch and combine
    pp: bool | None = None  # messages of a pipeline


@dataclass(frozen=True)
class RowSoftware:
    """How a stack ran; None: as its preset says."""

    compile: bool | None = None
    cuda_graphs: bool | None = None
    fp8: Scaling | None = None
    overlap: RowOverlap | None = None


# Keys of a model that a row has fields for, which may say them as well.
_SAID_BY_FIELDS = {
    **{"layers": "layers", "width": "hidden", "heads": "heads", "kv_heads": "kv_heads"},
    **{"head_dim": "head_dim", "vocab": "vocab", "activation": "activation", "tied": "tied"},
    **{"moe.experts": "experts", "moe.top_k": "topk", "moe.ffn": "ffn_hidden"},
}
ACHIEVED = {
    "step_time_s": RowField("number", False, "seconds of one optimizer step"),
    "tokens_per_s_per_gpu": RowField("number", False, "read where there is no step time"),
    "tflops_per_gpu": RowField(
        "number",
        False,
        "read where there is neither, by the convention of `fivefold plan` (causal attention at "
        "half, no recomputation), and reported apart",
    ),
    "peak_mem_gib": RowField(
        "number", False, "what the first rank's allocator reserved at its peak"
    ),
    "status": RowField(
        "text", False, "`Success`, `OOM`, or another word: failed for another reason"
    ),
}


def unknown_keys(row: Row) -> Iterator[str]:
    """Keys that no one reads, in words; a run may depend on them."""
    for key in row:
        if key not in FIELDS:
            hint = did_you_mean(key, FIELDS)
            near = f": {hint}" if hint.endswith("?") else ""
            yield f"unknown key {key!r} is passed over{near}"
    extra = cast("Row", row.get("extra") or {})
    for key in extra:
        if key not in EXTRA:
            yield f"unknown key 'extra.{key}' is passed over"


class MeasuredRuns(NamedTuple):
    """The rows of some files; a row with a known id only adds fields that the first one lacks."""

    rows: list[Row]
    num_repeated: int


def read_runs(paths: Sequence[Path]) -> MeasuredRuns:
    """Every row of every file; an error lists all problems of a file, each with its line."""
    by_id: dict[str, Row] = {}
    lines = 0
    for path in paths:
        for row in _rows(path):
            lines += 1
            by_id[row["id"]] = {**row, **by_id.get(row["id"], {})}
    return MeasuredRuns(list(by_id.values()), lines - len(by_id))


def _tables(path: Path) -> Iterator[tuple[str, tuple[dict[str, Any], list[str]]]]:
    """Every row of a file and its problems, by its position in words."""
    if path.suffix == ".toml":
        table = read_toml(path)
        runs = table.get("run", [table])
        if not isinstance(runs, list) or ("run" in table and len(table) > 1):
            raise BadFile(str(path), ["write a table [[run]] for each run, and nothing beside"])
        null = {name: None for name, field in FIELDS.items() if field.needed}  # TOML has no null
        for number, row in enumerate(cast("list[Any]", runs), start=1):
            yield f"run {number}", _checked({**null, **row} if isinstance(row, dict) else row)
        return
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FivefoldError(
            f"cannot read {path}: {reason}; give a file with one JSON object per line"
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"line {number}", _row(line)


def _rows(path: Path) -> list[Row]:
    rows: list[Row] = []
    problems: list[str] = []
    seen: dict[str, str] = {}
    for position, (row, wrong) in _tables(path):
        name = row.get("id")
        if not wrong and name in seen:
            wrong = [f"id {name!r} is already in {seen[name]}: give every run its own id"]
        problems += [f"{position}: {problem}" for problem in wrong]
        rows.append(row)
        seen[str(name)] = position
    if not rows:
        problems.append("it has no runs: write one JSON object per line")
    if problems:
        num_extra = len(problems) - _MOST_PROBLEMS
        tail = [f"and {num_extra} more"] if num_extra > 0 else []
        raise BadFile(str(path), [*problems[:_MOST_PROBLEMS], *tail])
    return rows


def _row(line: str) -> tuple[dict[str, Any], list[str]]:
    """The row of one line, and its problems."""
    try:
        row = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return {}, [f"not JSON: {error}"]
    return _checked(row)


def _checked(row: Any) -> tuple[dict[str, Any], list[str]]:
    """A row, and its problems."""
    if not isinstance(row, dict):
        return {}, ["not a JSON object: write {...} with the fields of a run"]
    table = cast(dict[str, Any], row)
    wrong = list(_lift(table))
    wrong += _problems(table, FIELDS, "")
    if not table.get("id") and "id" in table:
        wrong.append("id is empty: give every run its own id")
    achieved = table.get("achieved")
    if isinstance(achieved, dict):
        wrong += _problems(cast(dict[str, Any], achieved), ACHIEVED, "achieved.")
    elif "achieved" in table and achieved is None:
        wrong.append("achieved is null: write {} if nothing was measured")
    wrong += _strict_problems(table)
    return table, wrong


def _lift(row: dict[str, Any]) -> Iterator[str]:
    """Move keys of the table `shape` that are fields of a row there; two values are a problem."""
    shape = row.get("shape")
    if not isinstance(shape, dict):
        return
    row["shape"] = top = dict(cast("dict[str, Any]", shape))
    if isinstance(top.get("moe"), dict):
        top["moe"] = dict(top["moe"])
    for key, field in _SAID_BY_FIELDS.items():
        inner, _, last = key.rpartition(".")
        table: Any = top.get(inner) if inner else top
        if isinstance(table, dict) and last in table:
            value = cast("dict[str, Any]", table).pop(last)
            if row.get(field, value) not in (None, value):
                yield f"shape.{key} = {value!r}, but the row says {field} = {row[field]!r}"
            row[field] = value


def _strict_problems(row: Row) -> Iterator[str]:
    """Problems of the tables whose unknown keys would change what is priced."""
    shape, software = row.get("shape"), row.get("software")
    if isinstance(shape, dict):
        table = dict(cast("dict[str, Any]", shape))
        base = table.pop("base", None)
        if base is not None and base not in models.presets():
            yield f"shape.base = {base!r}: {did_you_mean(str(base), models.presets())}"
        yield from problems_of(Shape, table, "shape.")
    if isinstance(software, dict):
        yield from problems_of(RowSoftware, software, "software.")
        overlap = cast("dict[str, Any]", software).get("overlap")
        for axis in ("tp", "ep"):
            share = cast("dict[str, Any]", overlap).get(axis) if isinstance(overlap, dict) else None
            if isinstance(share, int | float) and not 0 <= share <= 1:
                yield f"software.overlap.{axis} = {share!r}: give a share from 0 to 1"


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number, write null")


def _problems(table: Mapping[str, Any], fields: dict[str, RowField], prefix: str) -> Iterator[str]:
    for name, field in fields.items():
        if name not in table and field.needed:
            yield f"{prefix}{name} is missing: {field.meaning}; write null if it is unknown"
        value = table.get(name)
        if value is not None and not _is(value, field.kind):
            yield f"{prefix}{name} = {value!r} is not {_KINDS[field.kind]}: {field.meaning}"
        elif fields is ACHIEVED and field.kind == "number" and value is not None and value <= 0:
            yield f"{prefix}{name} = {value!r} must be above 0; write null if it is unknown"


_KINDS = {
    "text": "text",
    "number": "a finite number",
    "flag": "true or false",
    "table": "a JSON object",
}


def _is(value: object, kind: str) -> bool:
    if kind == "number":
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return math.isfinite(value)
    return isinstance(value, {"text": str, "flag": bool, "table": dict}[kind])
