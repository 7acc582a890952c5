"""The parsers of vLLM and SGLang themselves as judges of emitted commands, where their sources are.

FIVEFOLD_VLLM and FIVEFOLD_SGLANG name checkouts: git clone https://github.com/vllm-project/vllm and
https://github.com/sgl-project/sglang, which need not be installed (tests/engine_judge.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.commands.plan import plan_serving
from fivefold.core.layout.layout import Layout
from tests.pure.test_serving_flags import PLANS

ROOT = Path(__file__).parent.parent.parent
_WHY = "names no checkout (see the head of this file)"


def judged(engine: str, lines: list[str]) -> list[dict[str, Any]]:
    """What the parser of an engine says of command lines."""
    folder = os.environ[f"FIVEFOLD_{engine.upper()}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine_judge", engine, folder],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def plans(engine: str) -> dict[str, tuple[str, Layout]]:
    """Emitted commands with their layouts; variables of launchers have values."""
    found: dict[str, tuple[str, Layout]] = {}
    for name, asked in PLANS.items():
        given = dict(asked)
        answer = plan_serving(given.pop("model"), **given)
        line = answer.flags(engine).line
        line = line.replace("$NODE_RANK", "0").replace("$HEAD_NODE", "10.0.0.1")
        found[name] = line, answer.choice.chosen.layout
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engine_reads_what_is_emitted(engine: str) -> None:
    if f"FIVEFOLD_{engine.upper()}" not in os.environ:
        pytest.skip(f"FIVEFOLD_{engine.upper()} {_WHY}")
    emitted = plans(engine)
    wrong = next(iter(emitted.values()))[0].replace("size", "sise", 1)
    *answers, misspelt = judged(engine, [*(line for line, _ in emitted.values()), wrong])
    assert "error" in misspelt, "the judge refuses what it does not know"
    for (line, layout), answer in zip(emitted.values(), answers, strict=True):
        assert "found" in answer, (line, answer)
        found = answer["found"]
        if engine == "vllm":
            assert found["tensor_parallel_size"] == layout.tp
            assert found["pipeline_parallel_size"] == layout.pp
            assert found["data_parallel_size"] == max(layout.ep // layout.tp, 1)
            assert found["enable_expert_parallel"] == (layout.ep > 1)
            assert found["model_tag"].count("/") == 1
        else:
            assert found["tp_size"] == max(layout.tp, layout.ep)
            assert found["pp_size"] == layout.pp and found["ep_size"] == layout.ep
            assert found["enable_dp_attention"] == (layout.ep > layout.tp)
            assert found["model_path"].count("/") == 1
