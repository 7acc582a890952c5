"""DPO: loss and gradients equal the published formula in plain PyTorch, in every layout.

The formula runs on the decoder of the judge, which shares no code with fivefold, on texts that the
test tokenizes itself. All pairs are in every step, so that their order does not matter.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_chat_masks import WORDS, tokenizer_of
from torch import Tensor

from fivefold.data.rows import Corpus, TokenRows
from fivefold.train import preference
from fivefold.train.preference import ScoredPairs
from tests.commands import in_fork
from tests.judge.decoder import Balance, Model, Weights, first_weights, summed_loss
from tests.judge.runs import read_checkpoint, to_toml

SEQ, PAIRS, STEPS, BETA, LR = 28, 8, 4, 0.5, 0.5
SIZES = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 46}
LAYOUTS = ("dp=2", "tp=2", "pp=2", "cp=2", "dp=2 tp=2", "pp=2 cp=2")
CLOSE = 1e-10
Text = tuple[list[int], list[int]]
"""Tokens of a prompt, and of an answer to it."""


@cache
def rows() -> list[dict[str, Any]]:
    """Pairs of every form; the last is held out. Some have an answer in their prompt too."""
    draw = random.Random(3)

    def said(role: str, most: int = 4) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, most)))}

    found: list[dict[str, Any]] = []
    for number in range(PAIRS + 1):
        prompt = [said("user")]
        if number % 3 == 2:
            prompt = [said("user", 2), said("assistant", 2), said("user", 2)]
        sides = [said("assistant", 6) for _ in range(2)]
        if number % 3 == 0:
            texts = [prompt[0]["content"], *(each["content"] for each in sides)]
            found.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
        else:
            chosen, rejected = ([*prompt, each] for each in sides)
            found.append({"chosen": chosen, "rejected": rejected})
    return found


def texts_of(row: dict[str, Any], encode: Callable[[str], list[int]]) -> list[Text]:
    """Prompt and answer of both sides, as the template of `tokenizer_of` writes them."""
    found: list[Text] = []
    for side in ("chosen", "rejected"):
        messages = row[side]
        if isinstance(messages, str):
            roles = (("user", row["prompt"]), ("assistant", messages))
            messages = [{"role": role, "content": text} for role, text in roles]
        whole = [f"<|im_start|>{one['role']} : {one['content']} <|im_end|>" for one in messages]
        *before, last = whole
        asked, answer = " ".join([*before, "<|im_start|>assistant :"]), last.split(":", 1)[1]
        found.append((encode(asked), encode(answer)))
    return found


@dataclass(frozen=True)
class Published:
    """Loss and gradient norm of each step by the formula, and what they leave."""

    losses: list[float]
    norms: list[float]
    margins: list[float]
    weights: Weights
    momentum: Weights


def published(pairs: list[list[Text]]) -> Published:
    """Plain autograd through −log σ(β·((lc − rc) − (lr − rr))), and SGD with momentum."""
    model = Model(**SIZES)
    weights = first_weights(model, 0, torch.float64)
    frozen = {name: one.clone() for name, one in weights.items()}
    momentum = {name: torch.zeros_like(one) for name, one in weights.items()}
    found = Published([], [], [], weights, momentum)
    for _ in range(STEPS):
        learning = {name: one.clone().requires_grad_() for name, one in weights.items()}
        margins = torch.stack([margin(model, learning, frozen, pair) for pair in pairs])
        loss = -F.logsigmoid(BETA * margins).mean()
        gradients = torch.autograd.grad(loss, list(learning.values()))
        for name, gradient in zip(weights, gradients, strict=True):
            momentum[name] = 0.9 * momentum[name] + gradient
            weights[name] = weights[name] - LR * momentum[name]
        found.losses.append(float(loss.detach()))
        found.margins.append(float(BETA * margins.detach().mean()))
        found.norms.append(float(torch.cat([each.flatten() for each in gradients]).norm()))
    return found


def margin(model: Model, learning: Weights, frozen: Weights, pair: list[Text]) -> Tensor:
    sides = [logprob(model, learning, each) - logprob(model, frozen, each) for each in pair]
    return sides[0] - sides[1]


def logprob(model: Model, weights: Weights, text: Text) -> Tensor:
    """Of an answer: what it adds to the loss of its prompt."""
    prompt, answer = text
    balance = Balance.of("none", model, 1)
    whole, asked = (torch.tensor([each]) for each in (prompt + answer, prompt))
    first = summed_loss(model, weights, balance, asked, None)
    return first - summed_loss(model, weights, balance, whole, None)


@dataclass(frozen=True)
class Prepared:
    """Tokens of the pairs, and what the formula says."""

    folder: Path
    wanted: Published

    def table(self, layout: str, **train: Any) -> dict[str, Any]:
        keys = {"optimizer": "sgd", "lr": LR, "lr_curve": "constant", "weight_decay": 0.0}
        keys |= {"clip": 1e9, "steps": STEPS, "data": str(self.folder / "pairs")}
        keys |= {"dpo_beta": BETA, "warmup": 0, **train}
        plan = {"model": "tiny", "layout": layout, "seq": SEQ, "batch": 2 * PAIRS}
        return {**plan, "microbatch_size": 1, "set": SIZES, "train": keys}

    def errors(self, layout: str, folder: Path) -> tuple[float, float, float]:
        """How far losses, norms and weights of a training are from the formula's."""
        (folder / "plan.toml").write_text(to_toml(self.table(layout)))
        done = in_fork(["train", "plan.toml", "--out", "run", "--dtype", "float64"], folder)
        assert done.returncode == 0, done.stderr
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        records, wanted = [json.loads(line) for line in lines], self.wanted
        tensors = read_checkpoint(max((folder / "run" / "checkpoints").glob("step-*")))
        kinds = {"model": wanted.weights, "optim/momentum": wanted.momentum}
        ours = [(each["loss"], each["preference"]["margin"]) for each in records]
        theirs = [*zip(wanted.losses, wanted.margins, strict=True)]
        return (
            float(np.abs(np.array(ours) - np.array(theirs)).max()),
            max(abs(a["norm"] - b) for a, b in zip(records, wanted.norms, strict=True)),
            max(
                float((tensors[f"{kind}/{name}"] - one).abs().max())
                for kind, these in kinds.items()
                for name, one in these.items()
            ),
        )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("pairs")
    tokenizer = tokenizer_of(folder / "in")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    words = "tokens pairs.jsonl --pairs --tokenizer in -o pairs --shard-tokens 100"
    done = in_fork(words.split(), folder)
    assert done.returncode == 0, done.stderr

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Prepared(folder, published([texts_of(row, encode) for row in rows()[:PAIRS]]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_is_the_published_formula(prepared: Prepared, layout: str, tmp_path: Path) -> None:
    found = prepared.errors(layout, tmp_path)
    assert max(found) < CLOSE, found


def test_the_formula_is_far_from_its_beginning(prepared: Prepared) -> None:
    """At the beginning all margins are 0, and a wrong weight could not be seen."""
    assert abs(prepared.wanted.losses[0] - np.log(2)) < CLOSE
    assert prepared.wanted.losses[-1] < 0.6


def other_sign(inner: Any) -> AbstractContextManager[Any]:
    def faulty(*given: Any) -> ScoredPairs:
        loss, weights = inner(*given)
        return ScoredPairs(loss, weights.abs())

    return patch.object(preference, "score_pairs", faulty)


def reference_of_the_next_pair(inner: Any) -> AbstractContextManager[Any]:
    def faulty(policy: Tensor, reference: Tensor, beta: float) -> ScoredPairs:
        return inner(policy, reference.roll(2), beta)

    return patch.object(preference, "score_pairs", faulty)


def weights_without_the_margin(inner: Any) -> AbstractContextManager[Any]:
    def faulty(policy: Tensor, reference: Tensor, beta: float) -> ScoredPairs:
        loss, _ = inner(policy, reference, beta)
        return ScoredPairs(loss, inner(reference, reference, beta).weights)

    return patch.object(preference, "score_pairs", faulty)


def a_mask_that_is_late(inner: Any) -> AbstractContextManager[Any]:
    read = Corpus.read

    def faulty(self: Corpus, row: int, into: TokenRows) -> None:
        read(self, row, into)
        into.silent[:] = np.roll(into.silent, 1)

    return patch.object(Corpus, "read", faulty)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "plant",
    [other_sign, reference_of_the_next_pair, weights_without_the_margin, a_mask_that_is_late],
)
def test_faults_of_pairs_are_caught(
    prepared: Prepared, plant: Callable[[Any], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    with plant(preference.score_pairs):
        assert max(prepared.errors("dp=2", tmp_path)) > 1e6 * CLOSE


def refused(prepared: Prepared, folder: Path, table: dict[str, Any]) -> str:
    """What an error says; nothing is written."""
    (folder / "plan.toml").write_text(to_toml(table))
    done = in_fork(["train", "plan.toml", "--out", "run"], folder)
    assert done.returncode == 2 and not (folder / "run").exists()
    return done.stderr


def test_trainings_that_cannot_use_pairs_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    usual = prepared.table("dp=1")
    no_dpo, no_pairs = prepared.table("dp=1", dpo_beta=0.0), prepared.table("dp=1", data="stdlib")
    no_pairs["set"] = {**SIZES, "vocab": 300}
    cases = {
        "--set dpo_beta=0.1": no_dpo,
        "has no preference pairs": no_pairs,
        "--microbatch-size 1": {**usual, "microbatch_size": 2},
        "even --batch": {**usual, "batch": 7},
        "--max-tokens 12": {**usual, "seq": 11},
        "dropout": {**usual, "set": {**SIZES, "dropout": 0.1}},
        "loss = assistant": prepared.table("dp=1", loss="all"),
        "0, which means no DPO": prepared.table("dp=1", dpo_beta=-1.0),
    }
    for said, table in cases.items():
        assert said in refused(prepared, tmp_path, table)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "w1", "chosen": "w2"}, "the pair has no rejected"),
        ({"prompt": "w1", "chosen": "w2", "rejected": "w2"}, "the same"),
        ({"chosen": "w2", "rejected": "w3"}, "no prompt"),
        ({"prompt": "w1", "chosen": 3, "rejected": "w3"}, "no list of messages"),
    ],
)
def test_bad_pairs_are_refused(
    prepared: Prepared, row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    lines = [json.dumps(each) + "\n" for each in (*rows()[:2], row)]
    (tmp_path / "bad.jsonl").write_text("".join(lines))
    tokenizer = str(prepared.folder / "in")
    words = ["tokens", "bad.jsonl", "--pairs", "--tokenizer", tokenizer, "-o", "out"]
    done = in_fork(words, tmp_path)
    assert done.returncode == 2 and said in done.stderr and "bad.jsonl, line 3" in done.stderr
    assert not (tmp_path / "out").exists()
    done = in_fork([*words[:2], "--chat", *words[3:]], tmp_path)
    assert done.returncode == 2 and "--pairs" in done.stderr


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sample(0.25)  # 16 seconds
def test_a_model_learns_what_is_preferred(prepared: Prepared, tmp_path: Path) -> None:
    """Through a stop, and in another layout after it: the reference stays that of the start."""
    pairs = str(prepared.folder / "pairs")
    keys = {"optimizer": "adamw", "lr": 3e-2, "steps": 12, "eval_every": 4, "lora": 4}
    table = prepared.table("dp=2", **keys, eval_data=f"own={pairs}")
    (tmp_path / "plan.toml").write_text(to_toml(table))
    train = ["train", "plan.toml", "--dtype", "float64", "--out"]
    for words in (["all"], ["run", "--until", "5"], ["run", "--resume", "--layout", "pp=2"]):
        done = in_fork([*train, *words], tmp_path)
        assert done.returncode == 0, done.stderr
    assert "accuracy 1.000 | margin" in done.stdout
    assert "every step as planned" in done.stdout
    whole, resumed = (records_of(tmp_path / name) for name in ("all", "run"))
    assert [each["loss"] for each in whole] == pytest.approx([each["loss"] for each in resumed])
    first, last = (resumed[at]["preference"] for at in (0, -1))
    assert resumed[0]["loss"] == pytest.approx(np.log(2)) and first["accuracy"] == 0.0
    assert last["accuracy"] == 1.0 and last["margin"] > first["margin"] + 0.5
    assert last["margin"] == pytest.approx(last["chosen"] - last["rejected"])
    own = resumed[-1]["evals"]["own"]
    assert own["loss"] == resumed[-1]["eval_loss"] < 0.6 and own["accuracy"] > 0.8

    (tmp_path / "run" / "reference.npz").unlink()
    more = ["run", "--resume", "--set", "steps=14"]
    done = in_fork([*train, *more], tmp_path)
    assert done.returncode == 2 and "no reference.npz" in done.stderr
