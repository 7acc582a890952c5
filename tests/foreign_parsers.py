"""The parsers of Megatron-LM, nanotron and TorchTitan's main branch, read from their sources on a
CPU: `python -m tests.foreign_parsers NAME SOURCES FILE ...` prints what each file means to them.

SOURCES is a folder with checkouts called Megatron-LM, nanotron and torchtitan. Packages that only
kernels and data need are replaced by empty ones where they are missing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import typing_extensions

MISSING = (
    *("triton", "datasets", "numba", "flash_attn", "grain", "torchdata", "wandb", "tensorboard"),
    *("google", "PIL", "grouped_gemm"),
)


ANSWER = "understood: "  # starts a line of what is printed


class _Nothing:
    """Stands for a name of a missing package; as a decorator it returns what it decorates."""

    def __init__(self, *given: Any, **named: Any) -> None: ...

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __or__(self, _other: Any) -> Any:
        return _Nothing()

    __ror__ = __or__


class _EmptyModule(ModuleType):
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {}) if name[0].isupper() else _Nothing()


class _MissingPackages(MetaPathFinder, Loader):
    """Asked last, so that an installed package is used."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = name.split(".")[0] in MISSING
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def prepare(*folders: Path) -> None:
    """Make sources importable: torch first, which would take an empty Triton for a real one."""
    import torch
    import torch._inductor.ir
    import torch.utils.flop_counter

    if not hasattr(typing, "override"):  # Python 3.11
        vars(typing).update(override=typing_extensions.override)
    vars(torch.cuda).update(
        get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: SimpleNamespace(major=9, minor=0),
    )
    sys.meta_path.append(_MissingPackages())
    sys.path[:0] = [str(folder) for folder in folders]


# --- Megatron-LM


def megatron(sources: Path) -> Callable[[str], list[Any]]:
    """The arguments of a script: parsed, validated, and made the configuration of a model."""
    prepare(sources / "Megatron-LM")
    from megatron.core import utils  # type: ignore[import-not-found]
    from megatron.core.models.common.embeddings import rope_utils  # type: ignore[import-not-found]
    from megatron.core.optimizer import OptimizerConfig  # type: ignore[import-not-found]
    from megatron.training import arguments  # type: ignore[import-not-found]
    from packaging.version import Version

    vars(utils).update(_te_version=Version("2.9.0"))  # as if Transformer Engine were there
    vars(rope_utils).update(fused_apply_rotary_pos_emb=_Nothing())

    def read(path: str) -> list[Any]:
        text = re.sub(r"(?m)^#.*$", "", Path(path).read_text("utf-8")).replace("\\\n", " ")
        words = shlex.split(text)
        start = words.index("pretrain_gpt.py")
        launch = dict(pairwise(words[:start]))
        world = int(launch["--nproc-per-node"]) * int(launch.get("--nnodes", 1))
        exported = [word.partition("=") for word in words if re.match("CUDA_[A-Z_]+=", word)]
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update({name: value for name, _, value in exported}, WORLD_SIZE=str(world))
        sys.argv = words[start:]
        args = arguments.parse_args()
        arguments.validate_args(args, {})
        model = arguments.core_transformer_config_from_args(args)
        named = {one.name for one in fields(OptimizerConfig)} & {*vars(args)}
        OptimizerConfig(**{name: getattr(args, name) for name in named})
        layout = model.pipeline_model_parallel_layout
        stages = (
            None
            if layout is None
            else [
                layers(rank[chunk])
                for chunk in range(len(layout.layout[0]))
                for rank in layout.layout
            ]
        )
        return [
            *(args.data_parallel_size, args.tensor_model_parallel_size),
            *(args.pipeline_model_parallel_size, args.context_parallel_size),
            *(args.expert_model_parallel_size, args.expert_tensor_parallel_size),
            *(args.micro_batch_size, args.global_batch_size, args.seq_length, args.train_iters),
            *(args.virtual_pipeline_model_parallel_size or 1, bool(args.sequence_parallel)),
            *(str(args.params_dtype), model.fp8, model.fp8_recipe if model.fp8 else None, stages),
        ]

    def layers(stage: Sequence[Any]) -> int:
        return sum(1 for each in stage if each.name == "decoder")

    return read


# --- nanotron


def nanotron(sources: Path) -> Callable[[str], list[Any]]:
    """A YAML file as nanotron's `Config`."""
    prepare(sources / "nanotron" / "src")
    from nanotron.config import get_config_from_file  # type: ignore[import-not-found]

    def read(path: str) -> list[Any]:
        config = get_config_from_file(path)
        one, tokens, optimizer = config.parallelism, config.tokens, config.optimizer
        return [
            *(one.dp, one.tp, one.pp, one.context_parallel_size, one.expert_parallel_size),
            *(tokens.micro_batch_size, tokens.batch_accumulation_per_replica),
            *(tokens.sequence_length, tokens.train_steps, config.global_batch_size),
            *(optimizer.zero_stage, str(config.model.dtype), type(one.pp_engine).__name__),
            *(one.tp_mode.name, bool(one.recompute_layer)),
        ]

    return read


# --- TorchTitan's main branch


def torchtitan(sources: Path) -> Callable[[str], list[Any]]:
    """The function of a Python file, its configuration, and the mesh that it makes."""
    prepare(sources / "torchtitan")
    sys.modules["torch.utils.tensorboard"] = _EmptyModule("tensorboard")
    from torchtitan.distributed import ParallelDims  # type: ignore[import-not-found]

    def read(path: str) -> list[Any]:
        space: dict[str, Any] = {}
        exec(Path(path).read_text("utf-8"), space)
        (name,) = [each for each in space if each.endswith("_planned")]
        config = space[name]()
        one, tokens = config.parallelism, config.training
        sizes = {
            "dp_replicate": one.data_parallel_replicate_degree,
            "dp_shard": one.data_parallel_shard_degree,
            "cp": one.context_parallel_degree,
            "tp": one.tensor_parallel_degree,
            "pp": one.pipeline_parallel_degree,
            "ep": one.expert_parallel_degree,
        }
        world = 1
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
            world *= sizes[axis]
        ParallelDims(**sizes, world_size=world)
        config.__post_init__()
        model = config.model_spec.model
        model.update_from_config(config=config)
        parts = one.module_fqns_per_model_part
        layers = [f"layers.{i}" for i in range(len(model.layers))]
        if parts is not None:
            named = [name for part in parts for name in part]
            assert named == ["tok_embeddings", *layers, "norm", "lm_head"], named
            assert all(hasattr(model, name.split(".")[0]) for name in named)
        return [
            *sizes.values(),
            *(tokens.num_tokens_per_microbatch_per_dp_rank, tokens.num_tokens_per_train_step),
            *(tokens.max_context_length, tokens.steps, one.num_pp_microbatches),
            type(config.activation_checkpoint).__qualname__,
            None if parts is None else [len({*part} & {*layers}) for part in parts],
        ]

    return read


PARSERS = {"megatron": megatron, "nanotron": nanotron, "torchtitan": torchtitan}


def main(name: str, sources: str, *paths: str) -> None:
    """A line for each file: what was understood, or what was refused."""
    import contextlib

    read = PARSERS[name](Path(sources))
    for path in paths:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found: Any = read(path)
        except (Exception, SystemExit) as error:
            found = f"{type(error).__name__}: {error}"
        print(f"{ANSWER}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
