"""`verify --device cuda`: ranks that share one GPU or have one each, against one process on it.

Without a GPU only the refusals run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.launch.backend import NcclLibrary, num_gpus

needs_gpu = pytest.mark.skipif(not num_gpus(), reason="no CUDA device: run this where there is one")
needs_nccl = pytest.mark.skipif(
    num_gpus() < 2 and not NcclLibrary.current().may_share,
    reason="NCCL needs two GPUs, or one that NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share",
)

FLOAT32 = {
    "data and tensor": ("tiny", "--layout", "dp=2 tp=2"),
    "pipeline": ("tiny", "--layout", "pp=4", "--schedule", "zb-v"),
    "ring": ("tiny", "--layout", "cp=4"),
    "experts": ("tiny-moe", "--layout", "dp=4 ep=4"),
    "experts over nodes": ("tiny-moe", "--layout", "dp=4 ep=4", "--set", "ep_nodes=2"),
    # Beyond the four that are promised: what recomputes, packs, gathers and takes turns.
    "kept collectives": ("tiny", "--layout", "tp=2 cp=2", "--recompute", "selective", "--packed"),
    "heads": ("tiny", "--layout", "cp=4", "--context", "ulysses"),
    "two directions": ("tiny-moe", "--layout", "dp=2 pp=2 ep=2", "--schedule", "dualpipe-v"),
    "no drain": ("tiny", "--layout", "pp=2", "--schedule", "pipedream"),
}


def verify(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fivefold", "verify", *words, "--json"]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=550
    )


def require_pass(done: subprocess.CompletedProcess[str], backend: str | None = None) -> None:
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["passed"], found
    assert found["traffic"]["match"]
    assert any("share one GPU" in note for note in found["notes"]) == (num_gpus() == 1)
    assert any("TF32" in note for note in found["notes"])
    if backend is not None and found["world"] > 1:
        assert any(backend in note for note in found["notes"])


@needs_gpu
@pytest.mark.parametrize("name", FLOAT32)
def test_ranks_on_one_gpu_compute_what_one_process_does(name: str) -> None:
    words = (*FLOAT32[name], "--dtype", "float32", "--device", "cuda", "--backend", "gloo")
    require_pass(verify(*words), "over gloo")


@needs_gpu
def test_float64_on_a_gpu() -> None:
    require_pass(verify("tiny", "--layout", "tp=2 cp=2", "--device", "cuda"))


@needs_nccl
@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "cp=2"])
def test_float64_over_nccl(layout: str) -> None:
    words = ("tiny", "--layout", layout, "--device", "cuda", "--backend", "nccl")
    require_pass(verify(*words), "over NCCL")


@pytest.mark.skipif(num_gpus() != 1, reason="for a machine with one GPU")
def test_ranks_do_not_share_a_gpu_over_nccl_unless_told() -> None:
    words = ("tiny", "--layout", "tp=2", "--device", "cuda", "--backend", "nccl")
    done = verify(*words, NCCL_MULTI_RANK_GPU_ENABLE="0")
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["exit_code"] == 2
    assert "2 ranks on 1 GPU: NCCL refuses ranks that share a GPU" in done.stderr


@needs_gpu
def test_bfloat16_compiled_with_the_kernels_of_training(tmp_path: Path) -> None:
    words = ("tiny", "--dtype", "bfloat16", "--device", "cuda", "--compile")
    require_pass(verify(*words, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)))
    kernels = [each for each in tmp_path.rglob("*.py") if "triton" in each.read_text("utf-8")]
    assert kernels, "nothing was compiled"


@pytest.mark.skipif(num_gpus() > 0, reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    done = verify("tiny", "--device", "cuda")
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["exit_code"] == 2
    assert "this machine has no CUDA device; leave --device out" in done.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("--device", "gpu"), "unknown --device 'gpu': choose from cpu, cuda"),
        (("--device", "cuda", "--set", "offload=cpu"), "leave it or --device out"),
    ],
)
def test_what_cannot_be_had_is_refused(words: tuple[str, ...], answer: str) -> None:
    done = verify("tiny", *words)
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["exit_code"] == 2
    assert answer in done.stderr
