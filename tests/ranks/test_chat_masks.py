"""Chat data: loss and gradients of a packed step equal those of `transformers` with -100 labels."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from fivefold import cli
from fivefold.data.rows import Corpus, TokenRows
from fivefold.data.shards import open_corpus

SEQ, ROWS = 24, 8
WORDS = [f"w{number}" for number in range(40)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} : {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant : {% endif %}"
)
LAYOUTS = (
    *("dp=1", "dp=2", "tp=2", "pp=2", "cp=2"),
    *("dp=2 tp=2", "dp=2 cp=2", "tp=2 cp=2", "tp=2 pp=2", "dp=2 pp=2"),
)
Turns = list[tuple[str, str]]


def drawn(generator: random.Random, *sizes: int) -> Turns:
    """Messages of so many words, of user and assistant in turn."""
    roles = ("user", "assistant")
    texts = [" ".join(generator.choices(WORDS, k=size)) for size in sizes]
    return [(roles[at % 2], text) for at, text in enumerate(texts)]


def length(turns: Turns) -> int:
    return sum(4 + len(text.split()) for _, text in turns)


def conversations() -> list[Turns]:
    """As many as fill eight rows, and one that is a row of its own, which is held out."""
    generator, found, full = random.Random(1), list[Turns](), list[int]()
    while True:
        turns = drawn(
            generator, *(generator.randint(1, 4) for _ in range(generator.choice((2, 2, 4))))
        )
        if not full or full[-1] + length(turns) > SEQ + 1:
            if len(full) == ROWS:
                return [*found, drawn(generator, 8, SEQ + 1 - 16)]
            full.append(0)
        full[-1] += length(turns)
        found.append(turns)


@dataclass(frozen=True)
class Chat:
    """An imported model, its tokens, and what transformers computes."""

    folder: Path
    loss: float
    gradients: dict[str, torch.Tensor]

    def differences(
        self, layout: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> tuple[float, float]:
        """How far loss and gradients of one step in a layout are from those of transformers."""
        run, out = folder / "run", folder / "out"
        shutil.copytree(self.folder / "run", run)
        words = ["train", str(run / "plan.toml"), "--out", str(run), "--resume", "--layout", layout]
        words += [
            "--seq",
            str(SEQ),
            "--batch",
            str(ROWS),
            "--set",
            "packed=true",
            "--dtype",
            "float64",
        ]
        keys = "optimizer=sgd lr=1 lr_curve=constant weight_decay=0 clip=1e9 steps=1"
        words += ["--set", f"{keys} data={self.folder / 'corpus'}", "--json"]
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        said = capsys.readouterr()
        assert not stop.value.code, said.err
        assert cli.run(["export", str(run), str(out)]) == 0
        capsys.readouterr()
        before, after = (
            load_file(each / "model.safetensors") for each in (self.folder / "in", out)
        )
        errors = [
            float((before[name].double() - after[name].double() - gradient).abs().max())
            for name, gradient in self.gradients.items()
        ]
        loss = json.loads(said.out)["steps"][0]["loss"]
        return abs(loss - self.loss), max(errors)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = tokenizer_of(folder / "in")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer.get_vocab()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "in")
    write_corpus(folder, "corpus", conversations(), folder / "in")
    assert (
        cli.run(["import", str(folder / "in"), "-o", str(folder / "run"), "--dtype", "fp32"]) == 0
    )
    loss, gradients = reference(model.double(), tokenizer)
    return Chat(folder, loss, gradients)


def write_corpus(folder: Path, name: str, chosen: list[Turns], tokenizer: Path) -> None:
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in turns]} for turns in chosen
    ]
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["tokens", str(file), "-o", str(folder / name), "--chat"]
    assert cli.run([*words, "--tokenizer", str(tokenizer)]) == 0


def tokenizer_of(folder: Path) -> transformers.PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    special = ["<|im_start|>", "<|im_end|>", "[UNK]"]
    vocab = {word: at for at, word in enumerate([*special, "user", "assistant", ":", *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    return tokenizer


def reference(
    model: transformers.LlamaForCausalLM, tokenizer: transformers.PreTrainedTokenizerFast
) -> tuple[float, dict[str, torch.Tensor]]:
    """Each conversation alone, with a label of -100 for each token that is not the assistant's."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for turns in conversations()[:-1]:
        ids, labels = list[int](), list[int]()
        for role, text in turns:
            head = tokenizer.encode(f"<|im_start|>{role} :", add_special_tokens=False)
            body = tokenizer.encode(f"{text} <|im_end|>", add_special_tokens=False)
            ids += [*head, *body]
            labels += [-100] * len(head)
            labels += body if role == "assistant" else [-100] * len(body)
        number = sum(label != -100 for label in labels)
        inputs = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        logits = model(input_ids=inputs["input_ids"]).logits[0, :-1]
        wanted = inputs["labels"][0, 1:]
        total = total + torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        theirs = model(**inputs).loss * number  # the sum that transformers means
        torch.testing.assert_close(
            theirs.double(),
            torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"),
            rtol=1e-5,
            atol=0,
        )
        count += number
    (total / count).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return float(total / count), gradients


CLOSE = 1e-6  # float32 weights are written, and rotary tables of transformers are float32


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chat_batch_is_that_of_transformers(
    chat: Chat, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert max(chat.differences(layout, tmp_path, capsys)) < CLOSE


@pytest.mark.parametrize("fault", ["leak", "shift"])
def test_a_leak_and_a_shifted_mask_are_caught(
    chat: Chat,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = Corpus.read

    def faulty(self: Corpus, row: int, into: TokenRows) -> None:
        read(self, row, into)
        if fault == "leak":
            into.begins[1:] = False
        else:
            into.silent[:] = np.roll(into.silent, 1)

    monkeypatch.setattr(Corpus, "read", faulty)
    assert min(chat.differences("dp=1", tmp_path, capsys)) > 1000 * CLOSE


def test_conversations_that_see_one_another_are_refused(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(chat.folder / "run" / "plan.toml"), "--out", str(tmp_path / "run")]
    words += ["--set", f"data={chat.folder / 'corpus'}", "--seq", str(SEQ)]
    assert cli.run(words) == 2
    assert "has conversations, several in a row" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_conversations_without_an_answer_are_no_part_of_an_evaluation(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch without a counted token adds none, in batches of any size."""
    turns = conversations()[:3]
    silent = [drawn(random.Random(2), SEQ, 3)]  # a row ends before the answer
    for name, chosen in {"silent": silent, "both": [*silent * 2, *turns], "chat": turns}.items():
        write_corpus(tmp_path, name, chosen, chat.folder / "in")
    sets = " ".join(f"{name}={tmp_path / name}" for name in ("silent", "both", "chat"))
    losses = set[float]()
    for layout, batch in (("dp=1", 1), ("dp=1", 8), ("dp=2", 2)):
        run = tmp_path / f"{layout}-{batch}"
        shutil.copytree(chat.folder / "run", run)
        words = [
            "train",
            str(run / "plan.toml"),
            "--out",
            str(run),
            "--resume",
            "--set",
            "packed=true",
        ]
        words += ["--seq", str(SEQ), "--batch", str(batch), "--dtype", "float64", "--json"]
        keys = f"optimizer=sgd lr=1e-30 steps=1 eval_every=1 eval_data='{sets}'"
        words += ["--layout", layout, "--set", f"{keys} data={chat.folder / 'corpus'}"]
        capsys.readouterr()
        assert cli.run(words) == 0
        last = json.loads(capsys.readouterr().out)["steps"][-1]
        assert last["eval_loss"] is None and "silent" not in last["evals"]
        losses |= {last["evals"]["both"]["loss"], last["evals"]["chat"]["loss"]}
    assert max(losses) - min(losses) < 1e-12


def test_rows_have_whole_conversations_and_assistant_turns_alone(chat: Chat) -> None:
    corpus = open_corpus(chat.folder / "corpus", 1000)
    assert corpus.num_rows(SEQ) == ROWS + 1 and corpus.masked
    (shard,) = corpus.shards
    lengths = [length(turns) for turns in conversations()]
    assert np.diff([*shard.begins, len(shard.tokens)]).tolist() == lengths
    assert shard.mask is not None
    said = sum(
        len(text.split()) + 1
        for turns in conversations()
        for role, text in turns
        if role == "assistant"
    )
    assert int(shard.mask.sum()) == said
