"""`fivefold eval` on a run beside lm-eval's own model class on the folder that it exports.

Three tasks of ours are on the disk: multiple choice, perplexity of texts longer than the model,
and completions. The package asks both models the same questions; scores of single answers, and
with them all metrics and standard errors, are equal to float32's rounding, and completions exactly.

    python -m venv build/lm-eval && build/lm-eval/bin/pip install -e ".[dev,eval]"
"""

from __future__ import annotations

import json
import math
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.commands import in_fork, in_new_process
from tests.ranks.test_evaluate import SIZES, saved

ROWS, FEWSHOT, RANDOM_DRAWS = 12, 2, 100
MEANS = ("acc", "acc_norm", "exact_match")
# Sums of at most 40 log-probabilities in float32, which each side adds in its own order: 40 half
# ulps of numbers below 32. Perplexities are the exponentials of their means.
CLOSE = 40 * 2.0**-20
HEAD = "task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {rows}\n"
HEAD += "test_split: test\nfewshot_split: test\nfewshot_config:\n  sampler: first_n\n"
TASKS = {
    "choice": """output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_target: '{{answer}}'
doc_to_choice: '{{choices}}'
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "roll": """output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "write": """output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: '{{written}}'
generation_kwargs:
  until: ['w7', ' w11']
  max_gen_toks: 6
  do_sample: false
metric_list:
  - metric: exact_match
""",
}
pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")


def text(draw: random.Random, size: int) -> str:
    return " ".join(f"w{draw.randrange(40)}" for _ in range(size))


def questions(folder: Path) -> list[dict[str, Any]]:
    """Rows whose answers are of several lengths; of every other row what the model writes is what
    the row wants."""
    draw, theirs = random.Random(0), harness(folder, torch.float32)
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        choices = [text(draw, size) for size in (1, 2, 3)]
        row = {"question": text(draw, draw.randint(2, 8)), "choices": choices}
        row |= {"answer": draw.randrange(3), "text": text(draw, 10 + 5 * number)}
        prompt = theirs.tok_encode(row["question"])
        tokens = theirs.model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        written = theirs.tok_decode(tokens[0, len(prompt) :].tolist(), skip_special_tokens=True)
        for stop in ("w7", " w11"):
            written = written.split(stop)[0]
        rows.append({**row, "written": written if number % 2 else "w0 w0"})
    return rows


def harness(folder: Path, dtype: torch.dtype) -> Any:
    """The package's own model class."""
    from lm_eval.models.huggingface import HFLM

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=4, max_length=32)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained, the folder that it exports, and tasks with their rows."""
    home = tmp_path_factory.mktemp("lm-eval")
    saved(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES), home / "model")
    # The package asks the tokenizer for the token before a text without context.
    tokenizer = Tokenizer.from_file(str(home / "model" / "tokenizer.json"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w39"
    ).save_pretrained(home / "model")
    (home / "text.txt").write_text("\n".join(text(random.Random(i), 30) for i in range(40)))
    keys = "--seq 16 --batch 4 --set steps=3,lr=1e-2,data=tokens"
    for command in (
        "import model -o run --dtype fp32",
        "tokens text.txt --tokenizer model --end none -o tokens",
        f"train run/plan.toml --out run --resume {keys}",
        "export run out",
    ):
        done = in_fork(command.split(), home)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = questions(home / "out")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        head = HEAD.format(name=name, rows=home / "rows.jsonl")
        (home / f"{name}.yaml").write_text(head + body)
    return home


def published(home: Path, shots: int) -> dict[str, dict[str, float]]:
    """What the package says of its own model class: its metrics of each task, by name."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model=harness(home / "out", torch.float32),
        tasks=[*TASKS],
        num_fewshot=shots,
        task_manager=TaskManager(include_path=str(home), include_defaults=False),
        log_samples=False,
        bootstrap_iters=RANDOM_DRAWS,
    )
    return {
        name: {key.removesuffix(",none"): value for key, value in row.items()}
        for name, row in results["results"].items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "shots"), [("dp=1", 0), ("dp=2 tp=2", FEWSHOT)])
def test_metrics_are_those_of_the_package(
    home: Path, layout: str, shots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(home / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = ["eval", "run", "--tasks", ",".join(TASKS), "--include-path", ".", "--json"]
    command += ["--layout", layout, "--dtype", "float32", "--num-fewshot", str(shots)]
    done = in_new_process(command, home)  # the package starts threads, after which no fork is safe
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = json.loads(done.stdout)["tasks"], published(home, shots)
    compared = 0
    for name, task in ours.items():
        assert task["samples"] == ROWS
        for metric, number in task["metrics"].items():
            expected = theirs[name].get(metric, theirs[name].get(f"{metric},none"))
            assert math.isclose(number["value"], expected, rel_tol=CLOSE), (name, metric)
            if metric in MEANS:  # the package draws at random for the errors of other metrics
                error = theirs[name][f"{metric}_stderr"]
                assert math.isclose(number["stderr"], error, rel_tol=CLOSE), (name, metric)
            compared += 1
    assert compared == 6
    assert 0 < ours["write"]["metrics"]["exact_match"]["value"] < 1
    assert 0 < ours["choice"]["metrics"]["acc"]["value"] < 1
