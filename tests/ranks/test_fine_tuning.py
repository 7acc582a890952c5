"""From a downloaded model and parquet conversations to one that transformers runs: killed, resumed
in another layout, evaluated, exported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from test_chat_masks import WORDS, tokenizer_of
from test_lost_rank import children
from test_pool import wait_until_gone

from fivefold import cli
from fivefold.records.run_writer import read_records
from fivefold.train.checkpoint.folders import latest

PATIENCE = 120.0  # seconds until a checkpoint is there
MOST = 12


def model_in(folder: Path) -> None:
    """A small Llama with random weights, and its tokenizer."""
    tokenizer = tokenizer_of(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer.get_vocab()),
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.get_vocab()["<|im_end|>"],
        **sizes,
        **heads,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def conversations_in(path: Path, first: int, count: int) -> None:
    """The assistant says the word after that of the user, twice."""
    rows = [
        [
            {"role": "user", "content": WORDS[at % 20]},
            {"role": "assistant", "content": f"{WORDS[at % 20 + 1]} {WORDS[at % 20 + 1]}"},
        ]
        for at in range(first, first + count)
    ]
    pq.write_table(pa.table({"messages": rows}), path)


def kill_after_a_checkpoint(words: list[str], run: Path) -> None:
    """Start a training, and end it when it has written another checkpoint than that of step 0."""
    with subprocess.Popen(
        [sys.executable, "-m", "fivefold", *words],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    ) as process:
        until, ranks = time.monotonic() + PATIENCE, list[int]()
        while (found := latest(run)) is None or found.name == "step-00000000":
            assert process.poll() is None and time.monotonic() < until
            ranks = children(process.pid)
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    wait_until_gone(ranks)


@pytest.mark.sample(0.25)  # half a minute
def test_a_model_learns_a_conversation_through_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run, out = tmp_path / "in", tmp_path / "run", tmp_path / "out"
    model_in(source)
    for name, first, count in (("train", 0, 400), ("valid", 400, 40)):
        conversations_in(tmp_path / f"{name}.parquet", first, count)
        chat = ["tokens", f"{tmp_path}/{name}.parquet", "--chat", "--tokenizer", str(source)]
        assert cli.run([*chat, "-o", f"{tmp_path}/{name}"]) == 0
    assert cli.run(["import", str(source), "-o", str(run), "--dtype", "fp32"]) == 0
    keys = "steps=80 lr=2e-2 save_every=8 eval_every=40"
    keys += f" data={tmp_path}/train eval_data={tmp_path}/valid"
    words = ["train", f"{run}/plan.toml", "--out", str(run), "--resume", "--set", "packed=true"]
    words += ["--seq", "48", "--batch", "8", "--set", keys, "--layout"]
    kill_after_a_checkpoint([*words, "dp=2 tp=2"], run)
    killed_after = int(latest(run).name[5:])  # type: ignore[union-attr]
    assert 0 < killed_after < 80
    assert cli.run([*words, "pp=2"]) == 0
    records = read_records(run / "metrics.jsonl")
    assert [each.step for each in records] == [*range(1, 81)]
    assert records[-1].restart == 1 and records[-1].evals is not None
    assert records[-1].evals["valid"]["loss"] < 0.3 < records[0].loss  # type: ignore[operator]
    assert cli.run(["export", str(run), str(out)]) == 0

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    message = [{"role": "user", "content": WORDS[7]}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs = model.generate(prompt, do_sample=False, max_new_tokens=MOST)[0, prompt.shape[1] :]
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"messages": message}) + "\n")
    capsys.readouterr()
    said = ["generate", str(out), "--file", str(asked), "--chat", "--max-tokens", str(MOST)]
    assert cli.run([*said, "--json"]) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ours["tokens"] == theirs.tolist()
    assert tokenizer.decode(theirs).split()[:2] == [WORDS[8]] * 2  # what it was taught
