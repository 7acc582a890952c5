"""Adapters behind one port: clients name them as models; PEFT and merged models are the judges."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

import fivefold.train.checkpoint.checkpoints  # here, and not in every fork
import fivefold.train.loop  # noqa: F401
from tests.commands import in_fork
from tests.ranks.serving import NUM_WORDS, RunningServer, ask, make_model, serving, under_load

TRAIN = "train {0}/plan.toml --out {0} --resume --seq 32 --batch 2 --device cpu"
NAMES = {"tiny": "model", "first": "first", "second": "second"}
TOKENS = 12


def fivefold_words(home: Path, words: str, code: int = 0) -> str:
    done = in_fork(words.split(), home)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two runs that have tuned it, one of them as PEFT stores it, and both merged."""
    home = tmp_path_factory.mktemp("home")
    make_model(home / "model")
    tunings = {
        "first": "lora=3 lora_alpha=9 lr=0.1",
        "second": "lora=2 lora_targets=q+v+down lr=0.4 seed=1",
    }
    for name, keys in tunings.items():
        fivefold_words(home, f"import model -o {name} --dtype fp32")
        words = " ".join(f"--set {key}" for key in f"data=synthetic compile=false {keys}".split())
        fivefold_words(home, f"{TRAIN.format(name)} --steps 4 {words}")
        fivefold_words(home, f"export {name} {name}-merged")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(home / "model" / file, home / f"{name}-merged" / file)
    fivefold_words(home, "export second second-peft --adapter")
    return home


def asked() -> list[dict[str, Any]]:
    """Requests for every model, whose prompts begin alike."""
    draw, bodies = random.Random(3), list[dict[str, Any]]()
    longest = [draw.randrange(59) for _ in range(70)]
    for length in (4, 40, 70):
        for model in (*NAMES, "first"):
            body = {"model": model, "prompt": longest[:length], "max_tokens": TOKENS, "n": 2}
            bodies.append(body | {"temperature": 1 if length == 40 else 0, "seed": length})
    return bodies


@pytest.fixture(scope="module")
def expected(home: Path) -> list[tuple[str, ...]]:
    """What servers of the base and of merged models answer."""
    answers: dict[int, tuple[str, ...]] = {}
    for model, folder in NAMES.items():
        source = home / (folder if folder == "model" else f"{folder}-merged")
        with serving(source, home / f"{model}.txt", "--dtype", "float64") as running:
            for number, body in enumerate(asked()):
                if body["model"] == model:
                    reply = asyncio.run(ask(running.port, body | {"model": "tiny"}))
                    assert reply is not None and reply.status == 200, reply
                    answers[number] = reply.texts
    assert len({answers[number] for number in range(3)}) == 3, "adapters must differ"
    return [answers[number] for number in sorted(answers)]


def words_of(home: Path) -> tuple[str, ...]:
    adapters = f"adapters=first={home / 'first'}+second={home / 'second-peft'}"
    return ("--dtype", "float64", "--cache-gb", "0.0003", "--set", adapters)


def check(running: RunningServer, expected: list[tuple[str, ...]], count: int = 60) -> None:
    replies = asyncio.run(under_load(running.port, asked(), count, cut=0.2))
    whole = [(which, reply) for which, reply in replies if reply is not None]
    assert whole and all(reply.texts == expected[which] for which, reply in whole)
    assert running.settles(), "a block is leaked"


@pytest.mark.parametrize(
    "layout",
    [
        ("--replicas", "2"),
        ("--layout", "tp=2"),
        ("--layout", "pp=2", "--prefill", "tp=2"),
        ("--batch-invariant",),
    ],
    ids=lambda words: "".join(words).strip("-"),
)
def test_answers_are_those_of_merged_models(
    home: Path, expected: list[tuple[str, ...]], tmp_path: Path, layout: tuple[str, ...]
) -> None:
    with serving(home / "model", tmp_path / "log.txt", *words_of(home), *layout) as running:
        check(running, expected)
        assert 'adapter="second"' in running.output.read_text()
        assert running.stop() == 0


def test_clients_see_the_models_that_there_are(home: Path, tmp_path: Path) -> None:
    with serving(home / "model", tmp_path / "log.txt", *words_of(home)) as running:
        client = openai.OpenAI(base_url=running.url, api_key="any", max_retries=0)
        models = {model.id: model.model_dump() for model in client.models.list()}
        assert list(models) == list(NAMES)
        assert models["first"]["parent"] == "tiny" and "parent" not in models["tiny"]
        assert client.models.retrieve("second").id == "second"
        chat = client.chat.completions.create(
            model="second", messages=[{"role": "user", "content": "w3"}], max_tokens=3
        )
        assert chat.model == "second"
        rule = "'third.* is not served: ask for 'tiny' or 'first' or 'second'"
        for call in (
            lambda: client.models.retrieve("third"),
            lambda: client.completions.create(model="third", prompt="w3"),
        ):
            with pytest.raises(openai.NotFoundError, match=rule.replace("'third", "third")):
                call()
        assert client.completions.create(model="first", prompt="w3", max_tokens=2).model == "first"


def test_greedy_tokens_are_those_of_peft(home: Path, expected: list[tuple[str, ...]]) -> None:
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(model, home / "second-peft").eval()
    for body, texts in zip(asked(), expected, strict=True):
        if body["model"] == "second" and not body["temperature"]:
            tokens = torch.tensor([body["prompt"]])
            with torch.no_grad():
                for _ in range(TOKENS):
                    likeliest = model(tokens).logits[:, -1].argmax(-1, keepdim=True)
                    tokens = torch.cat([tokens, likeliest], 1)
            drawn = tokens[0, len(body["prompt"]) :].tolist()
            drawn = drawn[: drawn.index(NUM_WORDS - 1)] if NUM_WORDS - 1 in drawn else drawn
            assert texts[0].split() == [f"w{token}" for token in drawn]


def test_a_run_writes_with_its_own_adapters(home: Path) -> None:
    """It wrote what its base writes: the plan of the generator had no adapters."""
    prompt = ("--prompt", "w1 w2 w3", "--dtype", "float64", "--max-tokens", "9", "--device", "cpu")
    texts = {
        words: in_fork(["generate", *words.split(), *prompt], home).stdout
        for words in (
            *("model", "first", "first-merged", "model --adapter first", "second"),
            *("model --adapter second-peft", "first --batch-invariant", "first --layout tp=2"),
        )
    }
    assert len({texts["model"], texts["first"], texts["second"]}) == 3
    assert texts["first"] == texts["first-merged"] == texts["model --adapter first"]
    assert texts["first"] == texts["first --batch-invariant"] == texts["first --layout tp=2"]
    assert texts["second"] == texts["model --adapter second-peft"]


REFUSALS = {
    "--set adapters=first": "give a name and a folder, as NAME=DIR",
    "--set adapters=first=model": "is neither a run (plan.toml) nor an adapter of PEFT",
    "--set adapters=base=first --name base": "the name is the name of the base",
    "--set adapters=a=first+a=second": "the name is there already",
    "--set adapters=a=other-peft": "has shape (2, 32), and this model asks for (3, 32)",
    "--set adapters=a=longer": "it is of another base, with layers = 3, and this model has 2",
    "--set adapters=a=plain": "it was trained without lora, and has no adapters",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_a_wrong_adapter_ends_the_start_with_code_2(home: Path, words: str) -> None:
    if not (home / "other-peft").exists():
        shutil.copytree(home / "second-peft", home / "other-peft")
        config = json.loads((home / "other-peft" / "adapter_config.json").read_text())
        changed = json.dumps(config | {"r": 3})
        (home / "other-peft" / "adapter_config.json").write_text(changed)
        fivefold_words(home, "import model -o plain --dtype fp32")
        config = transformers.AutoConfig.from_pretrained(home / "model", num_hidden_layers=3)
        transformers.LlamaForCausalLM(config).save_pretrained(home / "three")
        fivefold_words(home, "import three -o longer --dtype fp32")
        keys = "--steps 1 --set data=synthetic --set lora=1 --set compile=false"
        fivefold_words(home, f"{TRAIN.format('longer')} {keys}")
    said = fivefold_words(home, f"serve model --port 0 --device cpu {words}", code=2)
    assert REFUSALS[words] in " ".join(said.split()), said


def test_an_adapter_of_other_weights_ends_the_start_with_code_2(home: Path) -> None:
    words = "serve second-merged --port 0 --device cpu --set adapters=a=first"
    said = fivefold_words(home, words, code=2)
    assert "adapter a (first) was trained on another base" in said
