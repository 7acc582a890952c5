"""An emitted configuration, run by TorchTitan 0.2.2 for ten steps on CPUs with gloo.

    python benchmarks/peer.py build/peer
    python benchmarks/torchtitan_cpu.py build/peer --layout "dp=2 tp=2"

The plan is of TorchTitan's own debug model. The file is used as it was written; the command line
adds what fivefold's loss "register it there" says: the name of the model, which has random tokens
here. Patched: what TorchTitan asks of a GPU (its name, memory and current device), Triton, which
it imports, and the reduction of FSDP2 that gloo lacks.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.foreign_parsers import prepare

ROOT = Path(__file__).parents[1]
STEP = re.compile(r"step: *(\d+) .*?loss: *([\d.a-z]+) .*?grad_norm: *([\d.a-z]+)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# TorchTitan's debug model, as a Hugging Face config.
DEBUG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 768,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rope_theta": 500000.0,
}


class CpuAsDevice(ModuleType):
    """torch.cpu with what TorchTitan asks of a GPU."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch.cpu, name)

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, *_: Any) -> Any:
        return SimpleNamespace(total_memory=2**30)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def sum_gradients() -> None:
    """FSDP2's sums with a factor are a reduction that gloo lacks: divide and sum instead."""
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor

    def with_sums(self: Any, factor: float) -> None:
        original(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    type.__setattr__(FSDPModule, "set_gradient_divide_factor", with_sums)


def run_rank() -> None:
    """One rank: TorchTitan's trainer on a CPU."""
    import torch
    import torch._utils

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(
        "runner", ROOT / "benchmarks/torchtitan_runner.py"
    )
    assert spec is not None and spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    device = CpuAsDevice("cpu_as_device")
    vars(torch._utils).update(
        _get_available_device_type=lambda: "cpu", _get_device_module=lambda _type: device
    )
    runner.prepare()
    prepare()
    sum_gradients()
    runner.register()
    from torchtitan import train  # type: ignore[import-not-found]

    train.main(train.Trainer)


def emitted(layout: str, schedule: str, path: Path) -> int:
    """Write the configuration; the number of ranks that it is for."""
    import json

    from fivefold.bridges.bridging import emit_plan
    from fivefold.core.plan.plan import PlanOptions, resolve
    from fivefold.core.plan.recipe import Recipe

    recipe = Recipe(steps=10, warmup=2, lr=8e-4, compile=False)
    keys: dict[str, Any] = {"seq": 256, "microbatch_size": 1, "microbatches": 4}
    options = PlanOptions(
        *(json.dumps(DEBUG), layout), **keys, schedule=schedule, train=recipe, precision="fp32"
    )
    plan = resolve(options)
    found = emit_plan("torchtitan", plan)
    print(found.text)
    path.write_text(found.text, "utf-8")
    return resolve(found.options).layout.world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", type=Path, help="the folder of benchmarks/peer.py")
    parser.add_argument("--layout", default="dp=2")
    parser.add_argument("--schedule", default="1f1b")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emitted.toml"
        world = emitted(given.layout, given.schedule, path)
        words = ["--job.config_file", str(path), "--job.dump_folder", folder]
        words += ["--model.name", "llama3_rand", "--model.flavor", "debugmodel"]
        words += ["--metrics.log_freq", "1"]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
        launch += ["--tee", "3"]
        paths = os.pathsep.join([str(given.peer.resolve()), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths}
        environment |= {"FIVEFOLD_TITAN_RANK": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launch, __file__, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    text = COLOURS.sub("", done.stdout + done.stderr)
    # Ranks without the last stage of a pipeline show a loss below 0.
    steps = {int(a): (float(b), float(c)) for a, b, c in STEP.findall(text)}
    for step, (loss, norm) in sorted(steps.items()):
        print(f"step {step:2} | loss {loss:.5f} | norm {norm:.4f}")
    if done.returncode or sorted(steps) != [*range(1, 11)]:
        print(text[-6000:], file=sys.stderr)
        return 1
    print(f"TorchTitan 0.2.2 ran 10 steps of the emitted file on {world} gloo ranks")
    return 0


if __name__ == "__main__":
    if os.environ.get("FIVEFOLD_TITAN_RANK"):
        run_rank()
    else:
        sys.exit(main())
