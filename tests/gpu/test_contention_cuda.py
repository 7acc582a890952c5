"""Kernels in place of collectives: how long they last, and what a step shows of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fivefold.launch import num_gpus

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
LAYOUT, SEQ = "tp=8", 8192


def lasts() -> None:
    """As long as is asked."""
    from fivefold.rehearse.occupy_kernel import Occupation

    occupation, events = Occupation(torch.device("cuda")), []
    occupation.start(20, 1e6, 1e-4)  # compiled here
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # so that the host is ahead, and events have its time no more
    for seconds in (1e-4, 1e-4, 1e-3, 5e-3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        occupation.start(20, 1e6, seconds)
        end.record()
        events.append((seconds, start, end))
    torch.cuda.synchronize()
    for seconds, start, end in events:
        measured = 1e-3 * start.elapsed_time(end)
        assert seconds <= measured < 1.1 * seconds + 5e-5, (seconds, measured)


def exposed() -> None:
    """What tensor ranks wait for in a layer is about what its collectives take; without them
    nothing is."""
    from fivefold.core.plan import PlanOptions, resolve
    from fivefold.rehearse.on_gpu import measure_rank

    keys = {"layers": "4", "vocab": "32768"}
    plan = resolve(
        PlanOptions(
            "llama-3.1-8b", layout=LAYOUT, seq=SEQ, machine="h100", precision="bf16", set=keys
        )
    )
    measured = measure_rank(plan, 0, contend=True)
    contended = measured.contended
    assert contended is not None
    print(measured.step, contended)
    assert contended.step > 1.05 * measured.step
    assert 0.2 * (contended.step - measured.step) < contended.exposed["tp"] < contended.step


CASES = {"lasts": lasts, "exposed": exposed}


@pytest.mark.parametrize("case", CASES)
def test_contention(case: str) -> None:
    done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        CASES[case]()
        print("passed", case, flush=True)
