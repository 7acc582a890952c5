"""The frameworks' own parsers as judges of emitted files, where their packages are installed.

pip install --no-deps torchtitan==0.2.2 tyro typeguard docstring_parser accelerate deepspeed hjson \
py-cpuinfo msgpack einops, into the environment or into a folder that PYTHONPATH names. Three are
read from their sources: FIVEFOLD_SOURCES names a folder with checkouts Megatron-LM, nanotron and
torchtitan, and pip install --no-deps dacite spmd_types==0.2.3 torch_checkpointing has what they
need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.bridges.bridging import emit_plan
from fivefold.bridges.job_values import Values, values_of
from fivefold.core.plan.plan import resolve
from tests.bridge_plans import random_plan
from tests.foreign_parsers import ANSWER

NUM_PLANS = 50
_SOURCES = os.environ.get("FIVEFOLD_SOURCES", "")
_WHY = "install it with pip install --no-deps (see the head of this file)"

# Each program reads the files that it is given, one after another, and prints what it understood.
_TITAN = """
import importlib.util, json, sys, types
alone = types.ModuleType("torchtitan")  # its own first lines import kernels, which need Triton
alone.__path__ = importlib.util.find_spec("torchtitan").submodule_search_locations
sys.modules["torchtitan"] = alone
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
for path in sys.argv[1:]:
    config = ConfigManager().parse_args(["--job.config_file", path])
    p, t = config.parallelism, config.training
    sizes = [
        p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.context_parallel_degree,
        p.tensor_parallel_degree, p.pipeline_parallel_degree,
    ]
    world = 1
    for size in sizes:
        world *= size
    ParallelDims(*sizes, p.expert_parallel_degree, p.expert_tensor_parallel_degree, world)
    print(json.dumps([
        p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.tensor_parallel_degree,
        p.pipeline_parallel_degree, p.context_parallel_degree, p.expert_parallel_degree,
        t.local_batch_size, t.global_batch_size, t.seq_len, config.activation_checkpoint.mode,
        p.module_fqns_per_model_part,
    ]))
"""
_ACCELERATE = """
import argparse, json, os, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
for path in sys.argv[1:]:
    found = load_config_from_file(path)
    given = (found.parallelism_config or {}).items()
    sizes = {k.removeprefix("parallelism_config_"): int(v) for k, v in given if k.endswith("_size")}
    config = ParallelismConfig(**sizes)
    print(json.dumps([
        config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.cp_size,
        found.num_processes, config.total_size, str(found.mixed_precision),
    ]))
"""
_DEEPSPEED = """
import json, sys
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
for path in sys.argv[1:]:
    table = json.load(open(path))
    zero = DeepSpeedZeroConfig(**table["zero_optimization"])
    tensor = TPTrainingConfig(**table.get("tensor_parallel", {}))
    print(json.dumps([int(zero.stage), tensor.autotp_size or 1, table["train_batch_size"]]))
"""


def judged(program: str, name: str, folder: Path) -> list[tuple[Values, list[object]]]:
    """Plans for a target, and what its own parser says of their files."""
    paths: list[str] = []
    plans: list[Values] = []
    for seed in range(NUM_PLANS):
        emitted = emit_plan(name, random_plan(seed))
        path = folder / f"{seed}{emitted.target.suffix}"
        path.write_text(emitted.text, "utf-8")
        paths.append(str(path))
        plans.append(values_of(resolve(emitted.options)))
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[") and "]" in line]
    answers = [
        json.loads(line) for line in lines if line.endswith("]") and line[1:2] in '0123456789"'
    ]
    return list(zip(plans, answers, strict=True))


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("torchtitan") is None, reason=f"no torchtitan: {_WHY}")
def test_torchtitan_reads_what_is_emitted(tmp_path: Path) -> None:
    for plan, found in judged(_TITAN, "torchtitan", tmp_path):
        dp = plan["replicate"] * plan["shard"]
        data = [dp, 1] if plan["zero"] == 0 else [plan["replicate"], plan["shard"]]
        pipeline = plan["pp"] > 1
        local = plan["microbatch_size"] * (plan["microbatches"] if pipeline else 1)
        batch = plan["microbatch_size"] * plan["microbatches"] * dp
        degrees = [plan[axis] for axis in ("tp", "pp", "cp", "ep")]
        assert found[:-1] == [*data, *degrees, local, batch, plan["seq"], plan["recompute"]]
        stages = plan["stage_layers"]
        assert (found[-1] is None) == (stages is None)
        if stages is not None:
            assert len(found[-1]) == stages.count(",") + 1  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("accelerate") is None, reason=f"no accelerate: {_WHY}")
def test_accelerate_reads_what_is_emitted(tmp_path: Path) -> None:
    for plan, found in judged(_ACCELERATE, "accelerate", tmp_path):
        dp = plan["replicate"] * plan["shard"]
        data = [dp, 1] if plan["zero"] == 0 else [plan["replicate"], plan["shard"]]
        world = dp * plan["tp"] * plan["cp"]
        assert found[:6] == [*data, plan["tp"], plan["cp"], world, world]
        assert str(found[6]).lower().endswith({"fp32": "no"}.get(plan["number"], plan["number"]))


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("deepspeed") is None, reason=f"no deepspeed: {_WHY}")
def test_deepspeed_reads_what_is_emitted(tmp_path: Path) -> None:
    for plan, found in judged(_DEEPSPEED, "deepspeed", tmp_path):
        batch = plan["microbatch_size"] * plan["microbatches"] * plan["shard"]
        assert found == [plan["zero"], plan["tp"], batch]


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(NUM_PLANS))
@pytest.mark.parametrize("name", ["nanotron", "accelerate", "axolotl"])
def test_yaml_is_what_pyyaml_reads(name: str, seed: int) -> None:
    """Numbers stay numbers: YAML 1.1 takes 1e-05 for a text."""
    plan = random_plan(seed)
    table = yaml.safe_load(emit_plan(name, plan).text)
    if name == "nanotron":
        rate = table["optimizer"]["learning_rate_scheduler"]["learning_rate"]
        assert rate == plan.options.train.lr
    if name == "axolotl":
        assert table["learning_rate"] == plan.options.train.lr
    assert isinstance(table, dict)


def of_sources(name: str, parser: str, folder: Path) -> list[tuple[Values, list[Any]]]:
    """As `judged`, by a parser that is read from its sources. Models that it lacks are left out."""
    paths: list[str] = []
    plans: list[Values] = []
    for seed in count():
        emitted = emit_plan(name, random_plan(seed))
        if any(loss.key == "model" and not loss.left for loss in emitted.losses):
            continue
        path = folder / f"{seed}{emitted.target.suffix}"
        path.write_text(emitted.text, "utf-8")
        paths.append(str(path))
        plans.append(values_of(resolve(emitted.options)))
        if len(plans) == NUM_PLANS:
            break
    command = [sys.executable, "-m", "tests.foreign_parsers", parser, _SOURCES, *paths]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    answers = [json.loads(line.removeprefix(ANSWER)) for line in lines]
    refused = [pair for pair in zip(paths, answers, strict=True) if isinstance(pair[1], str)]
    assert not refused, refused
    return list(zip(plans, answers, strict=True))


def without_sources(folder: str) -> bool:
    return not _SOURCES or not (Path(_SOURCES) / folder).is_dir()


def stages_of(plan: Values) -> list[int] | None:
    text = plan["stage_layers"]
    return None if text is None else [int(each) for each in text.split(",")]


_HOW = "name a folder with a checkout of it in FIVEFOLD_SOURCES (see the head of this file)"


@pytest.mark.nightly
@pytest.mark.skipif(without_sources("Megatron-LM"), reason=f"no Megatron-LM: {_HOW}")
def test_megatron_parses_what_is_emitted(tmp_path: Path) -> None:
    for plan, found in of_sources("megatron", "megatron", tmp_path):
        dp = plan["replicate"] * plan["shard"]
        rows = plan["microbatch_size"]
        assert found[:5] == [dp, *(plan[axis] for axis in ("tp", "pp", "cp", "ep"))]
        assert found[5] == plan["etp"] or (plan["ep"] == 1 and found[5] == plan["tp"])
        assert found[6:10] == [rows, rows * plan["microbatches"] * dp, plan["seq"], plan["steps"]]
        assert found[10] == (plan["chunks"] if plan["pp"] > 1 else 1)
        assert found[11] == (plan["sp"] and plan["tp"] > 1)
        number, *scaling = plan["number"].split()
        kinds = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16", "fp32": "float32"}
        assert found[12] == f"torch.{kinds[number]}"
        assert found[14] == (scaling[0] if scaling else None)
        assert found[15] == stages_of(plan)


@pytest.mark.nightly
@pytest.mark.skipif(without_sources("nanotron"), reason=f"no nanotron: {_HOW}")
def test_nanotron_parses_what_is_emitted(tmp_path: Path) -> None:
    engines = {"1f1b": "OneForwardOneBackward", "gpipe": "AllForwardAllBackward"}
    for plan, found in of_sources("nanotron", "nanotron", tmp_path):
        dp = plan["replicate"] * plan["shard"]
        rows, count = plan["microbatch_size"], plan["microbatches"]
        assert found[:5] == [dp, *(plan[axis] for axis in ("tp", "pp", "cp")), 1]
        assert found[5:10] == [rows, count, plan["seq"], plan["steps"], rows * count * dp]
        kinds = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        assert found[10:12] == [plan["zero"], f"torch.{kinds[plan['number']]}"]
        assert found[12].startswith(engines[plan["schedule"]])
        assert found[13] == ("REDUCE_SCATTER" if plan["sp"] else "ALL_REDUCE")
        assert found[14] == (plan["recompute"] == "full")


@pytest.mark.nightly
@pytest.mark.skipif(without_sources("torchtitan"), reason=f"no TorchTitan: {_HOW}")
def test_torchtitan_main_builds_what_is_emitted(tmp_path: Path) -> None:
    for plan, found in of_sources("torchtitan-main", "torchtitan", tmp_path):
        dp = plan["replicate"] * plan["shard"]
        data = [dp, 1] if plan["zero"] == 0 else [plan["replicate"], plan["shard"]]
        assert found[:6] == [*data, *(plan[axis] for axis in ("cp", "tp", "pp", "ep"))]
        row, count = plan["microbatch_size"] * plan["seq"], plan["microbatches"]
        assert found[6:10] == [row, row * count * dp, plan["seq"], plan["steps"]]
        assert found[10] == (count if plan["pp"] > 1 else 1)
        assert (found[11] == "FullAC.Config") == (plan["recompute"] == "full")
        assert found[12] == stages_of(plan)
