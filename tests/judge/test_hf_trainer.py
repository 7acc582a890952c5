"""Fine-tuning beside transformers' own `Trainer`, PEFT, and DPO on models of transformers.

Both sides start from one folder and read the same rows in one order. The `Trainer` has its own
clipping, accumulation, AdamW, schedules and groups of weight decay. In float64 losses, norms and
weights are equal to 1e-9. In float32 they are as near to the float64 of the `Trainer` as rounding
takes the `Trainer` itself, times 8.

A conversation is longer than half a row, so that each has a row of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.commands import in_fork
from tests.judge.runs import EXACT, read_checkpoint
from tests.judge.tokens import shuffle
from tests.model.float64 import Float64Everywhere
from tests.ranks.test_chat_masks import WORDS, tokenizer_of

SEQ, ROWS, HELD_OUT, BATCH, MICROBATCH, STEPS, SEED = 24, 24, 1, 8, 2, 7, 3
LR, CLIP, BETA, RANK, ALPHA = 1e-2, 0.05, 0.3, 3, 5
SAFETY = 8  # times the rounding of the Trainer itself, as `verify` allows
CURVES = {"cosine": "cosine_with_min_lr", "linear": "linear", "wsd": "warmup_stable_decay"}
TARGETS = ["q_proj", "o_proj", "up_proj"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
peft = pytest.importorskip("peft", reason="pip install peft, which make setup does")
Turns = list[tuple[str, str]]
Example = dict[str, list[int]]
"""`input_ids`, and `labels` of -100 for what the assistant does not say."""


def conversation(draw: random.Random) -> Turns:
    """Of 14 to 25 tokens: a row of its own, and no longer than one."""
    sizes = (draw.randint(3, 8), draw.randint(3, 9))
    roles = ("user", "assistant")
    return [
        (role, " ".join(draw.choices(WORDS, k=k))) for role, k in zip(roles, sizes, strict=True)
    ]


@cache
def conversations() -> list[Turns]:
    draw = random.Random(1)
    return [conversation(draw) for _ in range(ROWS + HELD_OUT)]


@cache
def pairs() -> list[dict[str, str]]:
    """Two answers to a prompt; the last pair is held out."""
    draw = random.Random(2)
    sizes = {"prompt": 5, "chosen": 6, "rejected": 4}
    return [
        {key: " ".join(draw.choices(WORDS, k=draw.randint(1, k))) for key, k in sizes.items()}
        for _ in range(BATCH // 2 + HELD_OUT)
    ]


def example(turns: Turns, tokenizer: Any) -> Example:
    """As the chat template of `tokenizer_of` writes it."""
    ids, labels = list[int](), list[int]()
    for role, text in turns:
        head = tokenizer.encode(f"<|im_start|>{role} :", add_special_tokens=False)
        body = tokenizer.encode(f"{text} <|im_end|>", add_special_tokens=False)
        ids += [*head, *body]
        labels += [-100] * len(head)
        labels += body if role == "assistant" else [-100] * len(body)
    return {"input_ids": ids, "labels": labels}


def collate(examples: list[Example]) -> dict[str, Tensor]:
    """Rows filled up on the right, where nothing sees or counts what is there."""
    longest = max(len(row["input_ids"]) for row in examples)
    fill = {"input_ids": 0, "labels": -100}
    rows = {
        key: torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in examples])
        for key, value in fill.items()
    }
    lengths = torch.tensor([[len(row["input_ids"])] for row in examples])
    return {**rows, "attention_mask": (torch.arange(longest)[None] < lengths).long()}


class Recorded(transformers.Trainer):
    """The Trainer, and the loss of each of its microbatches."""

    reference: Any  # the model before training

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


class Dpo(Recorded):
    """The published formula over a batch of pairs: chosen, rejected, chosen, rejected, …"""

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], **_: Any) -> Tensor:
        with torch.no_grad():
            frozen = answers(self.reference, inputs)
        rewards = answers(model, inputs) - frozen
        return -F.logsigmoid(BETA * (rewards[0::2] - rewards[1::2])).mean()


def answers(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Summed log-probabilities of the tokens with a label, of each row."""
    logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    scores = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (scores * (labels != -100)).sum(1)


@dataclass(frozen=True)
class Outcome:
    """What a training shows of each step, and the weights that it leaves, by their names in
    transformers."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]

    def errors(self, other: Outcome) -> dict[str, float]:
        """Largest of each kind: of numbers relative, of tensors to their largest element."""
        assert self.weights.keys() == other.weights.keys()
        return {
            "loss": largest(self.losses, other.losses),
            "norm": largest(self.norms, other.norms),
            "weights": max(
                float((weight.double() - other.weights[name].double()).abs().max())
                / float(other.weights[name].double().abs().max())
                for name, weight in self.weights.items()
            ),
        }


def largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Home:
    """A folder with a model, its tokenizer, an adapter, and tokens for fivefold."""

    folder: Path
    tokenizer: Any

    def model(self, adapter: bool) -> Any:
        """As transformers and PEFT load it."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder / "model", dtype=torch.float32
        )
        if not adapter:
            return model
        return peft.PeftModel.from_pretrained(model, self.folder / "adapter", is_trainable=True)

    def trained(self, kind: str, curve: str, dtype: torch.dtype, folder: Path) -> Outcome:
        """By the Trainer."""
        model, reference = self.model(kind == "lora").to(dtype), self.model(False).to(dtype)
        size = BATCH if kind == "dpo" else MICROBATCH
        trainer_class = Dpo if kind == "dpo" else Recorded
        with Float64Everywhere() if dtype == torch.float64 else nullcontext():
            for loaded in (model, reference):
                remake_rotary(loaded)
            trainer = trainer_class(
                model,
                arguments(curve, size, folder),
                data_collator=collate,
                train_dataset=self.rows(kind),
            )
            trainer.reference = reference
            trainer.train()
        parts = BATCH // size
        losses = [sum(trainer.losses[i * parts : (i + 1) * parts]) for i in range(STEPS)]
        logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        weights = {
            name.removeprefix("base_model.model.").replace(".default", ""): weight.detach()
            for name, weight in model.named_parameters()
            if weight.requires_grad
        }
        return Outcome(losses, [entry["grad_norm"] for entry in logs], weights)

    def rows(self, kind: str) -> list[Example]:
        """In the order in which fivefold reads them; all pairs are in every step."""
        if kind != "dpo":
            rows = [example(turns, self.tokenizer) for turns in conversations()[:ROWS]]
            places = [divmod(number, ROWS) for number in range(STEPS * BATCH)]
            return [rows[shuffle(SEED, epoch, index, ROWS)] for epoch, index in places]
        sides: list[Example] = []
        for pair in pairs()[: BATCH // 2]:
            for side in ("chosen", "rejected"):
                turns = [("user", pair["prompt"]), ("assistant", pair[side])]
                sides.append(example(turns, self.tokenizer))
        return sides * STEPS

    def ours(self, kind: str, curve: str, dtype: torch.dtype, layout: str, run: Path) -> Outcome:
        """By `fivefold train`, from the same folder."""
        adapter = f"--adapter {self.folder / 'adapter'}" if kind == "lora" else ""
        fivefold(f"import {self.folder / 'model'} -o {run} --dtype fp32 {adapter}", run.parent)
        train = {"steps": STEPS, "lr": LR, "lr_curve": curve, "warmup": 0, "clip": CLIP}
        train |= {"seed": SEED, "weight_decay": 0.1}
        train["data"] = self.folder / ("pairs" if kind == "dpo" else "chat")
        train |= {"dpo_beta": BETA} if kind == "dpo" else {}
        keys = " ".join(f"{key}={value}" for key, value in train.items())
        size = 1 if kind == "dpo" else MICROBATCH
        options = [*f"train {run}/plan.toml --out {run} --resume --layout".split(), layout]
        options += f"--seq {SEQ} --batch {BATCH} --microbatch-size {size}".split()
        options += [*f"--dtype {str(dtype).removeprefix('torch.')} --set".split(), keys]
        options += [] if kind == "dpo" else ["--set", "packed=true"]
        run_fivefold(options, run.parent)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        tensors = read_checkpoint(max((run / "checkpoints").glob("step-*")))
        weights = {
            name_of(key.removeprefix("model/")): tensor
            for key, tensor in tensors.items()
            if key.startswith("model/") and (kind != "lora" or ".lora." in key)
        }
        return Outcome(*([line[key] for line in records] for key in ("loss", "norm")), weights)


def remake_rotary(model: Any) -> None:
    """Make rotary tables in the type of the training: those of a folder are float32."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            fresh = type(module)(model.config)
            module.inv_freq = module.original_inv_freq = fresh.inv_freq


def name_of(name: str) -> str:
    """The name in transformers, or in PEFT, of a weight of ours."""
    renamed = {
        **{"embed.": "model.embed_tokens.", "head.weight": "lm_head.weight"},
        **{"head.norm.": "model.norm.", "norm.weight": "model.norm.weight"},
        **{"blocks.": "model.layers.", "attention_norm": "input_layernorm"},
        **{"mlp_norm": "post_attention_layernorm", "attention.": "self_attn."},
        **{"self_attn.out.": "self_attn.o_proj.", ".lora.a": ".lora_A.weight"},
        ".lora.b": ".lora_B.weight",
    }
    renamed |= {f"self_attn.{part}.": f"self_attn.{part}_proj." for part in "qkv"}
    renamed |= {f"mlp.{part}.": f"mlp.{part}_proj." for part in ("gate", "up", "down")}
    for ours, theirs in renamed.items():
        begins = ours in ("norm.weight", "embed.", "head.weight", "head.norm.")
        if name.startswith(ours) or not begins:
            name = name.replace(ours, theirs)
    return name


def fivefold(command: str, folder: Path) -> None:
    run_fivefold(command.split(), folder)


def run_fivefold(options: list[str], folder: Path) -> None:
    done = in_fork(options, folder)
    assert done.returncode == 0, done.stdout + done.stderr


def arguments(curve: str, size: int, folder: Path) -> transformers.TrainingArguments:
    """The recipe of `Home.ours` in the Trainer's words."""
    kwargs = {"cosine": {"min_lr_rate": 0.1}, "wsd": {"num_decay_steps": STEPS // 5}}
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=BATCH // size,
        learning_rate=LR,
        lr_scheduler_type=CURVES[curve],
        lr_scheduler_kwargs=kwargs.get(curve, {}),
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-5,
        weight_decay=0.1,
        max_grad_norm=CLIP,
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("home")
    tokenizer = tokenizer_of(folder / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer.get_vocab()), **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in turns]}
        for turns in conversations()
    ]
    for name, flag, table in (("chat", "--chat", rows), ("pairs", "--pairs", pairs())):
        lines = "".join(json.dumps(row) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text(lines)
        fivefold(f"tokens {name}.jsonl {flag} --tokenizer model -o {name}", folder)
    home = Home(folder, tokenizer)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
    model = peft.get_peft_model(home.model(False), lora)
    with torch.no_grad():  # B is zero at first, and the gradients of A are
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1)
    model.save_pretrained(folder / "adapter")
    return home


CASES = [
    *[("sft", "cosine", layout) for layout in ("dp=1", "dp=2 tp=2")],
    *[("sft", "linear", "pp=2"), ("lora", "linear", "dp=1"), ("lora", "wsd", "dp=2 tp=2")],
    *[("dpo", "cosine", "dp=1"), ("dpo", "linear", "dp=2")],
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "curve", "layout"), CASES, ids=lambda value: value)
def test_a_tuning_is_that_of_the_trainer(
    home: Home, kind: str, curve: str, layout: str, tmp_path: Path
) -> None:
    theirs = home.trained(kind, curve, torch.float64, tmp_path / "theirs")
    ours = home.ours(kind, curve, torch.float64, layout, tmp_path / "run")
    assert max(ours.errors(theirs).values()) < EXACT, ours.errors(theirs)
    assert all(norm > CLIP for norm in theirs.norms[:2]), "clipping clips"
    assert theirs.losses[-1] < theirs.losses[0]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sft", "lora", "dpo"])
def test_float32_is_as_near_as_rounding(home: Home, kind: str, tmp_path: Path) -> None:
    exact, rounded = (
        home.trained(kind, "cosine", dtype, tmp_path / str(dtype))
        for dtype in (torch.float64, torch.float32)
    )
    ours = home.ours(kind, "cosine", torch.float32, "dp=1", tmp_path / "run")
    allowed, differences = rounded.errors(exact), ours.errors(exact)
    assert all(differences[key] <= SAFETY * allowed[key] for key in allowed), (differences, allowed)
