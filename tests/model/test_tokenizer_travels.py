"""The tokenizer goes with the data, the run and the model; another one is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from small import LLAMA, filled

import fivefold as ff
from fivefold import cli
from fivefold.core.model.tokenizer import BYTES, TokenizerId, fingerprint, tokenizer_in
from fivefold.core.plan import plan
from fivefold.huggingface.config_export import as_hf
from fivefold.huggingface.files import write_model

TEXT = "the cat sat on the mat " * 40


def save_tokenizer(folder: Path, *words: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {word: at for at, word in enumerate(("[UNK]", "<|endoftext|>", *words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    table["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(table))


def test_what_changes_no_token_changes_no_fingerprint(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "the", "cat")
    data = (tmp_path / "tokenizer.json").read_bytes()
    table = json.loads(data)
    same = {**dict(reversed(table.items())), "padding": {"strategy": "BatchLongest"}}
    assert fingerprint(json.dumps(same, indent=7).encode()) == fingerprint(data)
    assert fingerprint(data.replace(b'"cat"', b'"dog"')) != fingerprint(data)
    merged = {"model": {"type": "BPE", "merges": [["a", "b"], ["ab", "c d"]]}}
    older = {"model": {"type": "BPE", "merges": ["a b", "ab c d"]}}
    assert fingerprint(json.dumps(merged).encode()) == fingerprint(json.dumps(older).encode())


def test_the_tokenizer_travels_and_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = replace(LLAMA, vocab=300)
    config = as_hf(shape, "float32").config
    state = filled(shape, torch.float32).state_dict()
    write_model(Path("in"), shape, config, state.__getitem__, torch.float32, 1 << 40)
    save_tokenizer(Path("in"), "the", "cat", "sat", "on", "mat")
    Path("other").mkdir()
    save_tokenizer(Path("other"), "mat", "cat", "sat", "on", "the")
    Path("text.txt").write_text(TEXT)

    def run(command: str, code: int = 0) -> tuple[str, str]:
        assert cli.run(cli.gather_pairs(command.split())) == code, capsys.readouterr().err
        return capsys.readouterr()

    said = run("import in -o run")[0]
    assert "fivefold tokens YOUR_TEXT --tokenizer run -o run/corpus" in said
    assert "--set packed=true data=run/corpus" in said and "0.001" not in said
    assert plan.read(Path("run/plan.toml")).train.lr == 2e-5
    train = "train run/plan.toml --out run --resume --seq 16 --batch 2 --set packed=true steps=1"
    found = tokenizer_in(Path("in"))
    assert found is not None and tokenizer_in(Path("run")) == found
    wrong = run(train, 2)[1]  # the default corpus
    assert "the data is from bytes" in wrong and found.fingerprint[:12] in wrong
    run("tokens text.txt -o wrong --tokenizer other")
    wrong = run(f"{train} data=wrong", 2)[1]
    for folder in ("in", "other"):
        named = tokenizer_in(Path(folder))
        assert named is not None and named.fingerprint[:12] in wrong
    # A tokenizer with more words than the model has is another tokenizer, not a small vocabulary.
    Path("larger").mkdir()
    save_tokenizer(Path("larger"), *(f"w{at}" for at in range(400)), *TEXT.split()[:5])
    run("tokens text.txt -o large --tokenizer larger")
    wrong = run(f"{train} data=large", 2)[1]
    named = tokenizer_in(Path("larger"))
    assert named is not None and named.fingerprint[:12] in wrong and "vocab=" not in wrong
    assert not Path("run/run.json").exists()

    run("tokens text.txt -o right --tokenizer run")
    wrong = run(f"{train} data=right eval_every=1 eval_data=large", 2)[1]
    assert named.fingerprint[:12] in wrong and found.fingerprint[:12] in wrong
    run(f"{train} data=right")
    start = json.loads(Path("run/run.json").read_text())["starts"][-1]
    assert start["tokenizer"]["fingerprint"] == found.fingerprint
    # A model without a tokenizer is held to that of the run.
    shutil.copytree("run", "bare")
    Path("bare/tokenizer.json").unlink()
    bare = "train bare/plan.toml --out bare --resume --set steps=2"
    assert "was trained with tokenizer.json" in run(f"{bare} data=wrong", 2)[1]

    run("export run out")
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md")
    assert all(Path("out", name).is_file() for name in names)
    card = Path("out/README.md").read_text()
    assert ", 1 warmup step |" in card
    assert found.fingerprint[:12] in card and "2e-05" in card and "| data | right |" in card
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    assert theirs("the cat")["input_ids"] == [2, 3] and theirs.chat_template


def test_a_run_on_bytes_brings_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path, "the", "cat")  # of the working folder, and so of no model

    def run(command: str, code: int = 0) -> tuple[str, str]:
        assert cli.run(cli.gather_pairs(command.split())) == code, capsys.readouterr().err
        return capsys.readouterr()

    small = "--seq 64 --batch 2 --set steps=6 lr=0.02 layers=2 vocab=1024 compile=false"
    run(f"train tiny --device cpu --out run {small}")
    generate = "generate run --device cpu --prompt def --max-tokens 8 --json"
    row = json.loads(run(generate)[0])
    assert len(row["text"]) == len(row["tokens"]) == 8 and max(row["tokens"]) < 256
    texts = ff.generate("run", "def", max_tokens=8, device="cpu")
    assert texts.text == row["text"]

    run("export run out")
    assert "| tokenizer | bytes, one token each |" in Path("out/README.md").read_text()
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    assert theirs.config.vocab_size == 1024
    tokenizer, text = transformers.AutoTokenizer.from_pretrained("out"), " dé\n  f <|en\x00"
    assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.eos_token_id == 256
    assert tokenizer.decode(list(text.encode())) == text
    # The file means bytes too: the model goes on with data that has none.
    run("import out -o again")
    assert tokenizer_in(Path("again")) == TokenizerId("tokenizer.json", BYTES)
    run("train again/plan.toml --out again --resume --device cpu --seq 64 --set steps=1")
    assert run("generate run --device cpu --prompt def --max-tokens 8")[0] == f"def{row['text']}\n"

    # What the records name decides, and not the size of the vocabulary.
    facts = json.loads(Path("run/run.json").read_text())
    facts["starts"][-1]["tokenizer"] = {"name": "tokenizer.json", "fingerprint": "5" * 64}
    Path("run/run.json").write_text(json.dumps(facts))
    assert "was trained with tokenizer.json, fingerprint 555" in run(generate, 2)[1]
    Path("run/run.json").write_text("{")
    assert "give --tokenizer" in run(generate, 2)[1], "without records the tokens mean nothing"
    run(f"{generate} --tokenizer bytes")
