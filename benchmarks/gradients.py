"""One GPU: what offloaded and bf16 gradients free, beside the estimate; whether weights are equal.

    python benchmarks/gradients.py [--model llama-3.2-1b]      about two minutes on an H200
    python benchmarks/gradients.py --device cpu --model tiny   the same steps without a GPU

Each case runs in a process of its own: bf16 weights with float32 masters, two microbatches, kernels
that add in one order. `held` is what is allocated when the update begins.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

GIB = 2**30
STEPS = 3
CASES: dict[str, dict[str, str]] = {
    "resident": {},
    "offloaded": {"offload_grads": "cpu"},
    "on disk": {"offload_grads": "nvme:{folder}"},
    "bf16": {"grad_dtype": "bf16"},
    "bf16, offloaded": {"grad_dtype": "bf16", "offload_grads": "cpu"},
}


def measure(model: str, device: str, said: dict[str, str]) -> dict[str, Any]:
    """A few steps of one case."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from fivefold.core.plan.plan import PlanOptions, resolve
    from fivefold.core.plan.recipe import Recipe
    from fivefold.cost.memory.static import static_bytes
    from fivefold.data.batches import samples
    from fivefold.parallel.composition import compose
    from fivefold.parallel.mesh import Mesh
    from fivefold.parallel.units.offload import GradientHome
    from fivefold.planner.estimate import estimate_plan
    from fivefold.planner.setting import estimate_setting
    from fivefold.step import step, updater_of

    torch.use_deterministic_algorithms(True)
    where = said.get("offload_grads", "none")
    recipe = Recipe(lr=3e-4, offload_grads=where, compile=False)
    keys = {"grad_dtype": said.get("grad_dtype", "fp32"), "train": recipe, "machine": "h200"}
    seq = 4096 if device == "cuda" else 32
    plan = resolve(PlanOptions(model, seq=seq, microbatches=2, **keys))
    mesh = Mesh.of(plan, torch.device(device))
    home = None if where == "none" else GradientHome(_folder(recipe.grads_disk))
    job = compose(plan, mesh, seed=0, dtype=torch.bfloat16, grad_home=home)
    updater, held = updater_of(job, recipe, master=True), [0]
    update = updater.step

    def noted() -> None:
        held[0] = torch.cuda.memory_allocated() if device == "cuda" else 0
        update()

    updater.step = noted  # type: ignore[method-assign]
    for number in range(STEPS):
        drawn = samples(plan.batch, plan.shape.vocab, seed=0, step=number).to(mesh.device)
        outcome = step(job, updater, drawn.of(0), 1.0)
    digest = hashlib.sha256()
    for each in job.owned:
        digest.update(each.tensor.detach().cpu().view(torch.uint8).numpy().tobytes())
    static = static_bytes(plan, 0, itemsize=2, optimizer="adamw", master=True)
    setting, _ = estimate_setting(plan.machine, "bf16", 0.0, "eager", 1.0)
    return {
        "held": held[0],
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "estimate": estimate_plan(plan, setting).allocated,
        "gradients": static.gradients,
        "loss": float(outcome.loss),
        "norm": float(outcome.norm),
        "weights": digest.hexdigest()[:16],
    }


def _folder(text: str | None):  # noqa: ANN202
    from pathlib import Path

    return None if text is None else Path(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", help="a case as JSON: measured here, one JSON line")
    words = parser.parse_args()
    if words.case is not None:
        print(json.dumps(measure(words.model, words.device, json.loads(words.case))))
        return
    found: dict[str, dict[str, Any]] = {}
    print(f"{'':<18}{'held':>9}{'peak':>9}{'estimate':>10}  loss, norm, weights", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, said in CASES.items():
            case = json.dumps({key: text.format(folder=folder) for key, text in said.items()})
            same = ["--model", words.model, "--device", words.device, "--case", case]
            output = subprocess.check_output([sys.executable, __file__, *same], text=True)
            one = found[name] = json.loads(output.splitlines()[-1])
            sizes = [one[key] / GIB for key in ("held", "peak", "estimate")]
            print(
                f"{name:<18}{sizes[0]:>9.3f}{sizes[1]:>9.3f}{sizes[2]:>10.3f}  "
                f"{one['loss']:.6f} {one['norm']:.6f} {one['weights']}",
                flush=True,
            )
    for name, resident in (
        ("offloaded", "resident"),
        ("on disk", "resident"),
        ("bf16", "resident"),
        ("bf16, offloaded", "bf16"),
    ):
        one, other = found[name], found[resident]
        freed = other["held"] - one["held"]
        equal = "equal" if one["weights"] == other["weights"] else "not equal"
        share = freed / other["gradients"]
        print(
            f"{name}: frees {freed / GIB:.3f} GiB, {share:.4f} of the gradients of {resident}; "
            f"weights are {equal} to those of {resident}"
        )


if __name__ == "__main__":
    main()
