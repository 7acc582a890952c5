"""Several adapters on a GPU, in captured steps: greedy tokens in float32 are those of a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import num_gpus
from tests.model.several_adapters import MODELS, AdapterCase, requests_of

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)


def same_tokens(model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case, limits = AdapterCase(model), ScheduleLimits(tokens=48, sequences=8)
    tokens: list[dict[str, tuple[int, ...]]] = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        engine = case.engine(torch.device(device), None, 60, limits, dtype)
        completions = engine.run(requests_of(case.text_model.shape.vocab, tokens=20))
        tokens.append({id: completion.tokens for id, completion in completions.items()})
    assert len(set(tokens[0].values())) > 6, "adapters answer otherwise"
    assert tokens[0] == tokens[1]
    assert getattr(engine.forward, "captured", None), "no step was captured"


@pytest.mark.parametrize("model", MODELS)
def test_several_adapters_on_a_gpu(model: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, model], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        same_tokens(name)
        print("passed ", name, flush=True)
