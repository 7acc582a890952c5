"""Files that people wrote for other frameworks: what is read of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.bridges.bridging import TARGETS, ForeignPlan, emit_plan, read_foreign
from fivefold.bridges.megatron import filled_stages, layout_text, parse_layout
from fivefold.cli import run
from fivefold.commands.job import foreign_plan
from fivefold.core.errors import BadFile
from fivefold.core.layout.layout import Layout
from fivefold.core.plan.plan import PlanOptions, resolve

SLURM = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8   # of one kind
#SBATCH -J train
export TP=${TP:-4}
PP=2
GPUS=8
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096  # of 8 B
    --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights --max-position-embeddings 8192
)
PARALLEL="--tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} \\
    --sequence-parallel --num-virtual-stages-per-pipeline-rank 2"
srun torchrun --nproc-per-node $GPUS --nnodes $((2 * 2)) pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $PARALLEL --micro-batch-size 1 --global-batch-size 64 \\
    --seq-length 4096 --bf16 --use-distributed-optimizer --lr 3e-4 \\
    --invented-option 7 --recompute-granularity full --recompute-method uniform \\
    --recompute-num-layers 1 --data-path corpus_text_document > log.txt
"""
NANOTRON = """
general: {project: p, seed: 6}
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 2048, intermediate_size: 11008,
    num_attention_heads: 16, num_hidden_layers: 28, num_key_value_heads: 2, vocab_size: 128256,
    max_position_embeddings: 4096, rms_norm_eps: 1.0e-05, tie_word_embeddings: true}
optimizer: {zero_stage: 1, clip_grad: 1.0, weight_decay: 0.01, invented: 3}
parallelism: {dp: 4, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokens: {micro_batch_size: 3, batch_accumulation_per_replica: 4, sequence_length: 4096,
  train_steps: 2000}
"""
TITAN = """
[job]
dump_folder = "outputs"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
[optimizer]
lr = 3e-4
"""
AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config: {offload_params: false, reshard_after_forward: true}
sequence_len: 2048
gradient_accumulation_steps: 1
micro_batch_size: 1
bf16: true
learning_rate: 2e-6
invented_key: yes
"""


def of_text(folder: Path, name: str, text: str, gpus: int | None = None) -> ForeignPlan:
    path = folder / name
    path.write_text(text, "utf-8")
    return read_foreign(path, gpus)


def test_a_slurm_script_around_megatron(tmp_path: Path) -> None:
    found = of_text(tmp_path, "train.slurm", SLURM)
    plan = resolve(found.options)
    assert plan.layout.world == 32
    assert str(plan.layout) == "dp=4 tp=4 pp=2"
    assert plan.layout.zero == 1
    assert (plan.options.schedule, plan.layout.chunks) == ("interleaved", 2)
    assert plan.batch.sequences == 64
    assert str(plan.recompute) == "full"
    assert plan.options.train.lr == 3e-4
    assert (plan.shape.layers, plan.shape.kv_heads, plan.shape.tied) == (32, 8, False)
    assert found.unknown == ("invented-option = 7",)
    assert "vocabulary" in found.notes[0]


def test_files_of_other_frameworks(tmp_path: Path) -> None:
    nanotron = of_text(tmp_path, "n.yaml", NANOTRON)
    assert nanotron.options.layout == "dp=4 tp=2 pp=2"
    assert nanotron.unknown == ("optimizer.invented = 3",)
    assert resolve(nanotron.options).batch.sequences == 48
    titan = of_text(tmp_path, "t.toml", TITAN, gpus=8)
    assert (titan.options.layout, titan.options.zero) == ("dp=4 tp=2", 3)
    assert titan.options.model == "llama-3.1-8b"
    assert not titan.unknown
    assert titan.options.recompute == "selective" and "every second matmul" in titan.notes[0]
    axolotl = of_text(tmp_path, "a.yml", AXOLOTL)
    assert axolotl.options.layout == "dp=2x4 tp=2"
    assert axolotl.options.model == "llama-3.1-8b"
    assert axolotl.unknown == ("invented_key = True",)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)
)
BAD = {
    "more ranks than degrees": ("t.toml", TITAN.replace("= -1", "= 3"), 16, "must multiply"),
    "a world that does not divide": ("t.toml", TITAN, 7, "no multiple of tp 2"),
    "no number of GPUs": ("t.toml", TITAN, None, "--gpus N"),
    "a negative degree": ("n.yaml", NANOTRON.replace("tp: 2", "tp: -2"), None, "at least 1"),
    "a batch that does not multiply": (
        *("s.sh", SLURM.replace("size 64", "size 63"), None, "not a multiple of"),
    ),
    "contradictory stages": (
        "s.sh",
        SLURM.replace("--bf16", '--bf16 --pipeline-model-parallel-layout "Et*16|t*16L"'),
        *(None, "contradict"),
    ),
    "a YAML tag": ("n.yaml", NANOTRON + "x: !!python/object:os.system {}\n", None, "tag"),
    "a YAML anchor": ("n.yaml", "a: &a [1, 1]\nb: [*a, *a]\n", None, "anchor"),
    "nested YAML": ("n.yaml", "a: " + "[" * 60 + "]" * 60, None, "nested deeper"),
    "bad YAML": ("n.yaml", "a: [1, 2", None, "not valid YAML"),
    "exploding YAML": ("n.yaml", NANOTRON + LAUGHS, None, "an anchor or an alias"),
    "a degree twice in YAML": ("n.yaml", NANOTRON + NANOTRON, None, "is given twice, in lines"),
    "a degree twice in a line": ("n.yaml", "tokens: {a: 1, a: 2}", None, "a is given twice"),
    "a degree twice in JSON": (
        *("d.json", '{"train_batch_size": 8, "x": {"a": 1, "a": 2}}', 8, "a is given twice: keep"),
    ),
    "10 MB": ("n.yaml", "#" * 10_000_000, None, "larger than 1 MB"),
    "10 MB of JSON": ("d.json", "[" * 10_000_000, None, "larger than 1 MB"),
    "10 MB of TOML": ("t.toml", TITAN + "#" * 10_000_000, 8, "larger than 1 MB"),
    "10 MB of a script": ("s.sh", SLURM + "x " * 5_000_000, None, "larger than 1 MB"),
    "10 MB of Python": ("p.py", "x = 1\n" * 1_700_000, None, "larger than 1 MB"),
    "degrees that contradict the GPUs": ("n.yaml", NANOTRON, 8, "must multiply"),
    "experts that do not multiply": (
        "a.yml",
        AXOLOTL + "expert_parallel_size: 2\n",
        16,
        "multiply",
    ),
    "fewer nodes than degrees": (
        *(
            "s.sh",
            SLURM.replace("2 * 2", "1").replace("TP:-4", "TP:-16"),
            None,
            "no multiple of tp",
        ),
    ),
    "no known key": ("n.yaml", "hello: world\n", None, "no key of it is known"),
    "a word for a number": ("n.yaml", NANOTRON.replace("tp: 2", "tp: two"), None, "whole number"),
    "infinity": ("n.yaml", NANOTRON.replace("tp: 2", "tp: .inf"), None, "whole number"),
    "a number of other digits": (
        "n.yaml",
        NANOTRON.replace("tp: 2", "tp: ²"),
        None,
        "whole number",
    ),
    "bad Python": ("p.py", "config.parallelism.x = (", None, "not valid Python"),
    "a variable": ("s.sh", SLURM.replace("PP=2", "PP=$1"), None, "set outside of the file"),
    "an unknown value": (
        *("n.yaml", NANOTRON.replace("1f1b", "2f2b"), None, "known here are 1f1b, afab"),
    ),
}


def test_values_that_are_not_here_are_said(tmp_path: Path) -> None:
    words = "--bf16 --fp8-format hybrid --recompute-activations --optimizer lion"
    text = SLURM.replace("--bf16", words).replace("--recompute-granularity full", "")
    text = text.replace("--recompute-method uniform", "").replace("--recompute-num-layers 1", "")
    found = of_text(tmp_path, "train.sh", text)
    assert found.options.precision == "fp8"
    assert found.options.recompute == "none"
    assert "optimizer = lion" in found.unknown
    assert any("delayed" in note for note in found.notes)
    assert any("core_attn" in note for note in found.notes)
    table = '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "x": 1}'
    path = tmp_path / "ds.json"
    path.write_text(table, "utf-8")
    deepspeed = read_foreign(path, 8, "llama-3-8b")
    assert deepspeed.options.zero == 2
    assert deepspeed.unknown == ("x = 1",)
    assert "train_batch_size" in deepspeed.notes[0]


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_their_rule(case: str, tmp_path: Path) -> None:
    name, text, gpus, rule = BAD[case]
    with pytest.raises(BadFile, match=rule):
        of_text(tmp_path, name, text, gpus)


def test_a_bad_file_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "n.yaml", tmp_path / "out.sh"
    path.write_text(NANOTRON + LAUGHS, "utf-8")
    assert run(["plan", str(path), "--emit", "megatron", "-o", str(out)]) == 2
    assert "write the value itself" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Et*3|(tt|)*29,m|L", (3, *[2] * 29, 0, 0)),
        ("Ettt|tt|ttL", (3, 2, 2)),
        ("E|t*4|L", (0, 4, 0)),
        ("Et*2L", (2,)),
    ],
)
def test_pipeline_layouts_of_megatron(text: str, layers: tuple[int, ...]) -> None:
    found = parse_layout(text)
    assert found.layers == layers
    if 0 not in layers:
        assert parse_layout(layout_text(layers, found.mtp)) == found
    else:
        filled = filled_stages(layers) if sum(layers) >= len(layers) else layers
        assert sum(filled) == sum(layers) and 0 not in filled


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("tt|ttL", "E must be there once"),
        ("Ett|tt", "L must be there once"),
        ("Et|m|tL", "MTP layers last"),
        ("E(t|*2L", "close it"),
        ("Et)L", "none opened"),
        ("Etx|L", "'x' at 2"),
        ("E*t|L", "no part of a layout"),
        ("E(((t*9999)*9999)*9999)L", "write fewer"),
        ("Et*0|L", "from 1 to"),
    ],
)
def test_bad_pipeline_layouts_are_refused(text: str, rule: str) -> None:
    with pytest.raises(BadFile, match=rule.replace("*", r"\*").replace("(", r"\(")):
        parse_layout(text)


def test_plan_reads_and_writes_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "titan.toml"
    script.write_text(SLURM, "utf-8")
    assert not run(["plan", str(script)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "read as Megatron-LM: megatron on dp=4 tp=4 pp=2"
    assert "not known here, so not planned: invented-option = 7" in printed
    assert not run(["plan", str(script), "--emit", "torchtitan", "-o", str(out)])
    assert capsys.readouterr().out.rstrip() == out.read_text("utf-8").rstrip()
    assert Layout.parse(read_foreign(out, 32).options.layout).world == 32


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--emit", "megatrn"], "did you mean megatron"),
        (["--set", "model=llama-3-8b"], "for a file of another framework"),
        (["--emit", "megatron", "--set", "what_if=seq=2x"], "leave --set what_if out"),
    ],
)
def test_bad_options_write_nothing(
    words: list[str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.sh"
    assert run(["plan", "llama-3-8b", "--layout", "dp=2", "-o", str(out), *words]) == 2
    assert rule in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_model_beside_a_file_that_cannot_be_parsed(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text, "utf-8")
    assert run(["plan", str(path), "--set", "model=llama-3-8b", "--gpus", "8"]) == 2
    assert f"cannot use {path}" in capsys.readouterr().err


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_is_emitted_may_have_any_name(target: str, tmp_path: Path) -> None:
    """Its text says whose file it is, where its ending does not."""
    keys = {"layout": "dp=4", "zero": 3, "microbatches": 2}
    emitted = emit_plan(target, resolve(PlanOptions(model="llama-3.1-8b", **keys)))
    path = tmp_path / "job.out"
    path.write_text(emitted.text, "utf-8")
    found = foreign_plan(str(path), 4, "llama-3.1-8b")
    assert found is not None and found.target.name == target
    assert found.options.layout == "dp=4"
