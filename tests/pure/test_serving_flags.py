"""Commands of other engines, held against the options that their sources define."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from fivefold.cli import main
from fivefold.commands.plan import plan_serving
from fivefold.core.model import presets as models
from fivefold.planner.serving.flags import EngineCommand, hosted_name

# Options that plans may use, with their types, as the engines' own sources define them: vLLM
# vllm/engine/arg_utils.py at a014e35 (2026-08-22), SGLang python/sglang/srt/server_args.py at
# cce0a12 (2026-08-22), TensorRT-LLM tensorrt_llm/commands/serve.py at 00209af (2026).
WHOLE = {
    "vllm": """tensor-parallel-size pipeline-parallel-size data-parallel-size nnodes
        data-parallel-size-local max-model-len max-num-seqs max-num-batched-tokens""",
    "sglang": """tp-size pp-size dp-size ep-size nnodes context-length max-running-requests
        chunked-prefill-size""",
    "trtllm": "tp_size pp_size ep_size gpus_per_node max_batch_size max_num_tokens max_seq_len",
}
SHARES = {
    "vllm": "gpu-memory-utilization",
    "sglang": "mem-fraction-static",
    "trtllm": "kv_cache_free_gpu_memory_fraction",
}
WORDS = {
    "vllm": "data-parallel-address node-rank master-addr quantization kv-cache-dtype",
    "sglang": "model-path node-rank dist-init-addr quantization kv-cache-dtype",
    "trtllm": "extra_llm_api_options",
}
SWITCHES = {
    "vllm": "enable-expert-parallel",
    "sglang": "enable-dp-attention",
    "trtllm": "enable_chunked_prefill",
}
STARTS = {
    "vllm": ["vllm", "serve"],
    "sglang": ["python", "-m", "sglang.launch_server"],
    "trtllm": ["trtllm-serve"],
}
PLANS = {
    "8b": {"model": "llama-3.1-8b", "machine": "h100", "gpus": 8},
    "405b": {"model": "llama-3.1-405b", "machine": "h100", "layout": "tp=8 pp=2"},
    "fp8": {"model": "llama-3.1-405b", "machine": "h100", "layout": "tp=8", "precision": "fp8"},
    "wide": {"model": "deepseek-v3", "machine": "h800", "layout": "dp=32 ep=32"},
    "both": {"model": "deepseek-v3", "machine": "h800", "layout": "dp=16 tp=2 ep=32"},
    "cut": {"model": "qwen3-30b-a3b", "machine": "h100", "layout": "tp=4 etp=4"},
}
PLANS["wide"]["precision"] = PLANS["both"]["precision"] = "fp8"
PLANS["fp8"]["kv"] = "fp8"


def parsed(engine: str, command: EngineCommand) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for kind, names in ((int, WHOLE), (float, SHARES), (str, WORDS)):
        for name in names[engine].split():
            parser.add_argument(f"--{name}", type=kind)
    parser.add_argument(f"--{SWITCHES[engine]}", action="store_true")
    words, start = shlex.split(command.line), STARTS[engine]
    assert words[: len(start)] == start
    if engine != "sglang":
        parser.add_argument("model")
    found = parser.parse_args(words[len(start) :])
    assert (found.model_path if engine == "sglang" else found.model).count("/") == 1
    return found


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("engine", STARTS)
def test_engines_know_the_options(engine: str, name: str) -> None:
    asked = dict(PLANS[name])
    answer = plan_serving(asked.pop("model"), **asked)
    command = answer.flags(engine)
    found, layout = parsed(engine, command), answer.choice.chosen.layout
    share = getattr(found, SHARES[engine].replace("-", "_"))
    assert 0 < share < 1
    attention = max(layout.tp, layout.ep) // layout.tp
    if engine == "vllm":
        inside = found.tensor_parallel_size * (found.data_parallel_size or 1)
        assert found.tensor_parallel_size == layout.tp and inside == layout.tp * attention
        assert found.enable_expert_parallel == (layout.ep > 1)
        pp = found.pipeline_parallel_size or 1
    else:
        inside, pp = found.tp_size, found.pp_size or 1
        assert (found.ep_size or 1) == layout.ep
    assert pp == layout.pp and inside * pp * command.replicas == layout.world


@pytest.mark.parametrize(("layout", "nodes"), [("tp=8", None), ("tp=4 pp=3", 2), ("tp=8 pp=2", 2)])
def test_part_of_a_node_is_a_node(layout: str, nodes: int | None) -> None:
    """12 GPUs are on two nodes of eight, and both are told of each other."""
    asked = {"machine": "h100", "layout": layout, "prompt": 512, "output": 64}
    command = plan_serving("llama-3.1-70b", **asked).flags("vllm")
    assert parsed("vllm", command).nnodes == nodes


def test_what_an_engine_cannot_do_is_said() -> None:
    asked = {"machine": "h800", "precision": "fp8", "layout": "dp=16 tp=2 ep=32"}
    found = plan_serving("deepseek-v3", **asked)
    losses = " ".join(found.flags("trtllm").losses)
    assert "attention over tp=2 inside ep=32 is not there" in losses
    assert "enable_attention_dp: true" in found.flags("trtllm").files["trtllm.yaml"]
    assert not found.flags("sglang").losses
    copies = plan_serving("qwen3-30b-a3b", machine="h200", layout="tp=2").flags("vllm")
    assert "every GPU has all experts" in copies.losses[0]
    longrope = {"kind": "longrope", "factor": "8", "original_seq": "1024"}
    longrope |= dict.fromkeys(("short", "long"), ",".join(["2"] * 64))
    said = {f"rope.{name}": each for name, each in longrope.items()}
    shape = models.with_overrides(models.load("llama-3.1-8b"), said)
    for prompt, count in ((900, 1), (700, 0)):
        asked = {"machine": "h100", "layout": "tp=1", "prompt": prompt, "output": 300}
        losses = plan_serving(models.to_text(shape), **asked).flags("vllm").losses
        assert sum("long factors for all texts" in each for each in losses) == count


def test_models_have_the_names_of_their_source() -> None:
    assert hosted_name(models.load("llama-3.1-405b")) == "meta-llama/Llama-3.1-405B"
    assert hosted_name(models.load("tiny")) == "tiny"


def test_emit_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.sh"
    asked = [
        "plan",
        "llama-3.1-8b",
        "--serve",
        "--machine",
        "h100",
        "--gpus",
        "8",
        "--output",
        "64",
    ]
    try:
        main([*asked, "--emit", "vllm", "-o", str(path)])
    except SystemExit as stop:
        assert not stop.code
    text = capsys.readouterr().out
    assert path.read_text("utf-8") == text
    assert "# 8 of these" in text and "--max-model-len 2112" in text
