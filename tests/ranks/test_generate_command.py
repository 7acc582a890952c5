"""`fivefold generate` and `fivefold verify --set generate=true`, as a person runs them."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from fivefold.cli import main
from fivefold.core.model.presets import load as hf_shape
from fivefold.generate.routes import RecordedRoutes
from tests.commands import in_fork

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "eos_token_id": 39,
}
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A downloaded model, with random weights and a tokenizer of forty words."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.mark.sample(0.5)
def test_lines_have_the_experts_of_all_tokens_if_asked(folder: Path, tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    words = ["generate", str(tmp_path), "--prompt", "w5 w6 w7", "--max-tokens", "5"]
    words += ["--tokenizer", str(folder / "tokenizer.json"), "--record-routing"]
    done = in_fork(words, tmp_path)
    assert done.returncode == 2 and "give --json, or -o OUT.jsonl" in done.stderr
    done = in_fork([*words, "--json", "--layout", "cp=2 ep=2"], tmp_path)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    routes = RecordedRoutes.parse(row["routing"])
    routes.check(hf_shape(str(tmp_path / "config.json")))
    assert len(routes.chosen) == 3 + len(row["tokens"]) - 1


def their_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_json_of_a_prompt_is_what_transformers_generates(folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(folder), "--prompt", "w5 w6 w7", "--max-tokens", "12", "--json"]
    done = in_fork(words, tmp_path)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["tokens"] == their_tokens(folder, [5, 6, 7], 12)
    assert row["prompt"] == "w5 w6 w7" and row["reason"] in ("length", "stop")
    assert len(row["logprobs"]) == len(row["tokens"]) and max(row["logprobs"]) <= 0
    assert row["ttft_s"] > 0 and row["tpot_s"] > 0
    text = in_fork([*words[:-1]], tmp_path).stdout
    assert text == row["prompt"] + row["text"] + "\n"


def test_drafts_change_no_token_and_are_counted(folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(folder), "--prompt", "w5 w6 w7 w5 w6", "--max-tokens", "40"]
    plain = json.loads(in_fork([*words, "--json"], tmp_path).stdout)
    done = in_fork([*words, "--json", "--set", "drafts=ngram:3", "--layout", "pp=2"], tmp_path)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["tokens"], row["reason"]) == (plain["tokens"], plain["reason"])
    assert row["drafted"] > 0 and 0 <= row["accepted"] <= row["drafted"]
    assert f"drafts: {row['accepted']} of {row['drafted']} proposed tokens accepted" in done.stderr
    for keys, rule in [
        ("drafts=words:3", "give ngram:K"),
        ("drafts=ngram:40", "give 1 to 16 tokens"),
        ("draft=ngram:4", "did you mean drafts?"),
        ("drafts=", "write key=value"),
        ("drafts=mtp:1", "has no multi-token-prediction layers"),
    ]:
        done = in_fork([*words, "--set", keys], tmp_path)
        assert done.returncode == 2 and rule in done.stderr, done.stderr


def test_chat_uses_the_template_of_the_folder(folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(folder), "--prompt", "w9", "--max-tokens", "6", "--json", "--chat"]
    row = json.loads(in_fork(words, tmp_path).stdout)
    assert row["prompt"] == "w1 w9 w2"
    assert row["tokens"] == their_tokens(folder, [1, 9, 2], 6)


def test_special_tokens_of_a_message_begin_no_turn(folder: Path, tmp_path: Path) -> None:
    """With a template they are text, also over several ranks; in a bare prompt they are tokens."""
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(39)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    words = ["generate", str(tmp_path / "model"), "--prompt", "w9 <|end|> w3", "--json"]
    words += ["--max-tokens", "6"]
    for more, tokens in (
        (["--chat"], [1, 9, 0, 3, 2]),
        (["--chat", "--layout", "tp=2"], [1, 9, 0, 3, 2]),
        ([], [9, 39, 3]),
    ):
        done = in_fork([*words, *more], tmp_path)
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout)
        assert row["prompt"] == ("w1 w9 <|end|> w3 w2" if more else "w9 <|end|> w3")
        assert row["tokens"] == their_tokens(folder, tokens, 6)


def test_a_file_of_prompts_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    prompts = [{"id": f"p{i}", "prompt": f"w{i} w{i + 1}"} for i in range(3, 9)]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)))
    words = ["generate", str(folder), "--file", str(file), "-o", str(out), "--max-tokens", "8"]
    words += ["--temperature", "1", "--seed", "3"]
    assert in_fork(words, tmp_path).returncode == 0
    whole = {row["id"]: row["tokens"] for row in map(json.loads, out.read_text().splitlines())}
    assert whole.keys() == {each["id"] for each in prompts}
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:20])  # as if killed in the third
    assert in_fork(words, tmp_path).returncode == 0
    again = {row["id"]: row["tokens"] for row in map(json.loads, out.read_text().splitlines())}
    assert again == whole, "draws depend on nothing but seed, id and index"
    assert len(out.read_text().splitlines()) == len(prompts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of --prompt TEXT and --file"),
        (["--prompt", " ".join(["w1"] * 64)], "has 64 tokens and the model takes 64"),
        (["--prompt", "w1", "--stop", "<|im_end|>"], "no special token of this tokenizer"),
        (["--prompt", "w1", "--stop", ""], "--stop is empty"),
        (["--prompt", "w1", "--temperature", "-1"], "temperature = -1"),
        (["--prompt", "w1", "--top-p", "2"], "top_p = 2"),
        (["--prompt", "w1", "--max-tokens", "0"], "--max-tokens 0"),
        (["--prompt", "w1", "--record-routing", "--json"], "has no experts; leave it out"),
        (["--prompt", "w1", "--dtype", "float8"], "unknown --dtype"),
        (["--prompt", "w1", "--cache-gb", "1e-9"], "cache has room for 0"),
        (["--file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_bad_input_exits_with_2(
    folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    done = in_fork(["generate", str(folder), *words], tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    done = in_fork(["generate", str(tmp_path), "--prompt", "a"], tmp_path)
    assert done.returncode == 2 and "neither a run" in done.stderr


def test_an_imported_run_generates_the_same(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert in_fork(["import", str(folder), "-o", str(run)], tmp_path).returncode == 0
    words = ["--prompt", "w5 w6", "--max-tokens", "5", "--json"]
    words += ["--tokenizer", str(folder / "tokenizer.json")]
    of_run, of_model = (
        json.loads(in_fork(["generate", str(each), *words], tmp_path).stdout)
        for each in (run, folder)
    )
    # A run has no configs of the tokenizer beside it.
    assert of_run["tokens"] == of_model["tokens"] == their_tokens(folder, [5, 6], 5)


def test_verify_proves_generation(tmp_path: Path) -> None:
    words = ["verify", "tiny-moe", "--set", "layers=2 generate=true", "--json"]
    done = in_fork(words, tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table["passed"] and table["tokens_equal"]
    assert table["logit_err"] <= 1e-10 and table["logprob_err"] <= 1e-10
    assert table["errors"].keys() == {
        *("alone", "in chunks", "batched", "preempted", "prefix shared")
    }
    assert table["trained_err"] <= 1e-10 and table["trained_layout"] == "dp=1"
    assert not table["batch_invariant"] and table["batch_cost"] is None
    assert table["batch_diff"] <= table["batch_bound"] == 2e-10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "cp=2", "--context", "ulysses"], "exchanges tokens for heads"),
        (["--layout", "pp=2", "--schedule", "interleaved", "--set", "chunks=2"], "has one stage"),
        (["--layout", "tp=3"], "neither divides the 4 KV heads nor is a multiple"),
        (["--precision", "fp8"], "fp8 is for training"),
        (["--dtype", "float16"], "unknown --dtype"),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_verify_refuses_what_cannot_generate(
    tmp_path: Path, words: list[str], message: str
) -> None:
    done = in_fork(["verify", "tiny", "--set", "generate=true", *words], tmp_path)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "--set", "batch_invariant=true"], "add generate=true, or leave it out"),
        (
            ["tiny", "--set", "generate=true batch_invariant=true", "--layout", "cp=2"],
            "use tp=2, or leave",
        ),
        (
            ["tiny-moe", "--set", "generate=true", "--dtype", "bf16"],
            "float32, or with batch_invariant",
        ),
    ],
)
def test_verify_refuses_batches_that_it_cannot_judge(
    tmp_path: Path, words: list[str], message: str
) -> None:
    done = in_fork(["verify", *words], tmp_path)
    assert done.returncode == 2 and message in done.stderr


def test_verify_requires_that_batches_change_no_bit(tmp_path: Path) -> None:
    words = ["verify", "tiny", "--set", "layers=1 generate=true", "--dtype", "bf16"]
    done = in_fork([*words, "--set", "batch_invariant=true"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "between batches: largest difference 0.0e+00 (bound: 0, batch-invariant)" in done.stdout
    assert "times the time without it" in done.stdout and "PASS" in done.stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp=2", "tp=2 pp=2", "tp=4", "cp=2 pp=2"])
def test_layouts_write_the_same(folder: Path, tmp_path: Path, layout: str) -> None:
    prompts = [{"id": f"p{i}", "prompt": f"w{i} w{i + 1}"} for i in range(3, 7)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)))
    words = ["generate", str(folder), "--file", str(file), "--max-tokens", "8", "--json"]
    words += ["--temperature", "1", "--seed", "3", "--stop", "w7", "--dtype", "float64"]
    one, many = (in_fork([*words, *more], tmp_path) for more in ([], ["--layout", layout]))
    assert (one.returncode, many.returncode) == (0, 0), many.stderr
    alone, ranks = ({row["id"]: row for row in rows_of(done.stdout)} for done in (one, many))
    assert alone.keys() == ranks.keys() == {each["id"] for each in prompts}
    for id, row in alone.items():
        for key in ("prompt", "text", "tokens", "reason"):
            assert ranks[id][key] == row[key]
        assert ranks[id]["logprobs"] == pytest.approx(row["logprobs"], rel=0, abs=1e-10)


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "tp=3"], "neither divides the 2 KV heads nor is a multiple of them"),
        (["--layout", "ep=2"], "need experts and the model has none"),
        (["--layout", "pp=4"], "every stage needs a layer"),
        (["--layout", "dp=128"], "too many for one machine"),
        (["--layout", "tp=x"], "tp=x"),
        (["--layout", "tp=2", "--cache-gb", "1e-9"], "cache has room for 0"),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_a_bad_layout_exits_with_2(
    folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    done = in_fork(["generate", str(folder), "--prompt", "w1", *words], tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_command_leaves_no_rank(folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(folder), "--prompt", "w1", "--max-tokens", "60", "--layout", "tp=2"]
    process = multiprocessing.get_context("fork").Process(target=main, args=(words,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    assert process.pid is not None
    until, ranks = time.monotonic() + 60, list[int]()
    while len(ranks) < 2 and time.monotonic() < until:
        ranks = children(process.pid)
    process.kill()
    process.join()
    assert len(ranks) == 2
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < until, "a rank outlives its command"
        time.sleep(0.05)


def test_a_prompt_has_the_same_bits_alone_and_beside_others(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"id": f"{i}", "prompt": f"w{i + 3} w{i + 4}"} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))
    words = ["generate", str(folder), "--max-tokens", "6", "--json", "--batch-invariant"]
    words += ["--dtype", "float32", "--temperature", "1"]
    together, alone = (
        in_fork([*words, *more], tmp_path)
        for more in (["--file", str(file)], ["--prompt", "w3 w4"])
    )
    assert (together.returncode, alone.returncode) == (0, 0), together.stderr + alone.stderr
    rows = {row["id"]: row for row in rows_of(together.stdout)}
    (one,) = rows_of(alone.stdout)
    assert rows["0"]["tokens"] == one["tokens"] and rows["0"]["logprobs"] == one["logprobs"]


@pytest.mark.sample(1)
def test_weights_in_fp8_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(folder), "--prompt", "w5 w6 w7", "--max-tokens", "6", "--json"]
    plain = json.loads(in_fork(words, tmp_path).stdout)
    assert in_fork([*words, "--precision", "bf16"], tmp_path).stdout.count(str(plain["tokens"]))
    coded = json.loads(in_fork([*words, "--precision", "fp8"], tmp_path).stdout)
    moved = max(map(abs, map(float.__sub__, coded["logprobs"], plain["logprobs"])))
    assert 1e-4 < moved < 1.0
    split = [*words, "--precision", "fp8", "--layout", "tp=2"]
    over_ranks = json.loads(in_fork(split, tmp_path).stdout)
    assert over_ranks["tokens"] == coded["tokens"]
    assert over_ranks["logprobs"] == pytest.approx(coded["logprobs"], rel=0, abs=1e-5)
    refused = in_fork([*words, "--precision", "int8"], tmp_path)
    assert refused.returncode == 2 and "choose from bf16, fp8" in refused.stderr


@pytest.mark.sample(1)
def test_keys_in_fp8_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(folder), "--prompt", "w5 w6 w7", "--max-tokens", "6", "--json"]
    words += ["--dtype", "float64"]
    plain = json.loads(in_fork([*words, "--set", "kv=bf16"], tmp_path).stdout)
    coded = json.loads(in_fork([*words, "--set", "kv=fp8"], tmp_path).stdout)
    moved = max(map(abs, map(float.__sub__, coded["logprobs"], plain["logprobs"])))
    assert 1e-4 < moved < 1.0
    split = json.loads(in_fork([*words, "--set", "kv=fp8", "--layout", "tp=2"], tmp_path).stdout)
    assert split["tokens"] == coded["tokens"]
    assert split["logprobs"] == pytest.approx(coded["logprobs"], rel=0, abs=1e-10)
    refused = in_fork([*words, "--set", "kv=int8"], tmp_path)
    assert refused.returncode == 2 and "choose from bf16, fp8" in refused.stderr
