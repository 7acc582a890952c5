"""`fivefold eval`: log-likelihoods in layouts beside `transformers`; the command with a stand-in
for the `lm-eval` package, and with the package itself where it is installed."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from fivefold.commands.evaluate import task_model_of
from fivefold.commands.generate import open_weights
from fivefold.generate.task_model import TaskModel
from fivefold.generate.text_model import ModelOptions, find_model, set_up
from tests.commands import in_fork, in_new_process

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 39,
}
LONG = " ".join(f"w{i}" for i in range(2, 39))
PAIRS = [
    ("w3 w4 w5", " w6"),
    ("w3 w4 w5 ", "w7 w8 w9"),
    ("", "w5 w6"),
    (LONG, " w7 w7"),
    *((" ".join(f"w{(7 * i + j) % 40}" for j in range(18)), f" w{i} w{i + 1}") for i in range(6)),
]


def saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A downloaded model, with random weights and a tokenizer of forty words."""
    config = transformers.LlamaConfig(**SIZES)
    return saved(transformers.LlamaForCausalLM, config, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    return saved(transformers.MixtralForCausalLM, config, tmp_path_factory.mktemp("experts"))


def asked_in(folder: Path, layout: str) -> TaskModel:
    model = find_model(folder)
    options = ModelOptions(layout, "float64", "cpu")
    return task_model_of(set_up(model, options, partial(open_weights, model, None)))


def numbers(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def expected(folder: Path, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """By one plain forward of transformers for each pair."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    found: list[tuple[float, bool]] = []
    for context, continuation in pairs:
        after = numbers(continuation)
        tokens = torch.tensor([(numbers(context) or [1]) + after])[:, -(32 + 1) :]
        with torch.no_grad():
            logits_NV = theirs(tokens[:, :-1]).logits[0, -len(after) :].double()
        target_N = torch.tensor(after)
        logprobs = logits_NV.log_softmax(1).gather(1, target_N[:, None])
        found.append((float(logprobs.sum()), bool((logits_NV.argmax(1) == target_N).all())))
    return found


def greedy(folder: Path) -> list[tuple[str, str]]:
    """What the model would write, and the same with another last token."""
    ours = asked_in(folder, "dp=1")
    contexts = [context for context, _ in PAIRS[:2]]
    texts = ours.generate_until([(each, {"max_gen_toks": 4}) for each in contexts])
    right = [(each, " " + text) for each, text in zip(contexts, texts, strict=True)]
    return [*right, *((each, f"{text.rsplit(' ', 1)[0]} w11") for each, text in right)]


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 tp=2", "pp=2", "cp=2"])
def test_log_likelihoods_are_those_of_transformers(folder: Path, layout: str) -> None:
    pairs, model = [*PAIRS, *greedy(folder)], asked_in(folder, layout)
    found, wanted = model.loglikelihood(pairs), expected(folder, pairs)
    for ours, (logprob, is_greedy) in zip(found, wanted, strict=True):
        assert ours.logprob == pytest.approx(logprob, rel=0, abs=1e-6)  # their norms are float32
        assert ours.is_greedy == is_greedy
    assert [each.is_greedy for each in found[-4:]] == [True, True, False, False]
    assert model.num_truncated == 1
    plain = asked_in(folder, "dp=1").loglikelihood(pairs)
    assert [each.logprob for each in found] == pytest.approx(
        [each.logprob for each in plain], rel=0, abs=1e-11
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp=2 tp=2 ep=4", "dp=2 ep=2", "pp=2 dp=2 ep=2"])
def test_experts_score_the_same_in_layouts(experts: Path, layout: str) -> None:
    one, many = (asked_in(experts, each).loglikelihood(PAIRS) for each in ("dp=1", layout))
    assert [each.logprob for each in many] == pytest.approx(
        [each.logprob for each in one], rel=0, abs=1e-11
    )
    assert [each.logprob for each in one] == pytest.approx(
        [logprob for logprob, _ in expected(experts, PAIRS)], rel=0, abs=1e-5
    )


# What the command needs of the package: a reader of tasks, and an evaluation that asks the model.
STAND_IN = """
import json
from types import SimpleNamespace

def simple_evaluate(model, tasks, num_fewshot, limit, task_manager, **more):
    print("the package talks")
    if tasks == ["broken"]:
        raise FileNotFoundError("rows.jsonl")
    asked = [SimpleNamespace(args=("w3 w4", f" w{i}")) for i in range(limit or 9)]
    scored = model.loglikelihood(asked)
    row = {"alias": "local", "likely,none": sum(each[0] for each in scored),
           "likely_stderr,none": 0.5, "match,strict": 1.0, "match_stderr,strict": "N/A"}
    return {"results": {"local": row}, "n-samples": {"local": {"effective": len(asked)}},
            "n-shot": {"local": num_fewshot or 0}}
"""
STAND_IN_TASKS = """
class TaskManager:
    def __init__(self, include_path=None, include_defaults=True):
        self.all_tasks = self.all_subtasks = ["local", "broken"]
    def match_tasks(self, names):
        return [each for each in self.all_tasks if each in names]
"""
STAND_IN_MODEL = "class LM: pass\n"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in {
        "__init__.py": STAND_IN,
        "tasks.py": STAND_IN_TASKS,
        "api/__init__.py": "",
        "api/model.py": STAND_IN_MODEL,
    }.items():
        file = tmp_path / "package" / "lm_eval" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in [each for each in sys.modules if each.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "package")


@pytest.mark.usefixtures("stand_in")
def test_json_has_metrics_samples_model_layout_and_seconds(folder: Path, tmp_path: Path) -> None:
    words = ["eval", str(folder), "--tasks", "local", "--limit", "5", "--num-fewshot", "2"]
    words += ["--layout", "tp=2", "--dtype", "float64", "--json", "--out", "out.json"]
    done = in_fork(words, tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert json.loads((tmp_path / "out.json").read_text()) == table
    pairs = [("w3 w4", f" w{i}") for i in range(5)]
    likely = sum(logprob for logprob, _ in expected(folder, pairs))
    task = table["tasks"]["local"]
    assert task["metrics"]["likely"] == {"value": pytest.approx(likely, abs=1e-5), "stderr": 0.5}
    assert task["metrics"]["match,strict"] == {"value": 1.0, "stderr": None}
    assert (task["samples"], task["num_fewshot"]) == (5, 2)
    assert (table["model"], table["layout"], table["dtype"]) == (str(folder), "tp=2", "float64")
    assert table["truncated_contexts"] == 0 and table["seconds"] > 0
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.usefixtures("stand_in")
def test_results_are_lines_of_a_table(folder: Path, tmp_path: Path) -> None:
    done = in_fork(["eval", str(folder), "--tasks", "local"], tmp_path)
    assert done.returncode == 0, done.stderr
    head, first, _, about = done.stdout.splitlines()
    assert head.split() == ["task", "metric", "value", "stderr", "samples"]
    assert first.split()[:2] == ["local", "likely"] and first.split()[3:] == ["0.5000", "9"]
    assert "dp=1 · float32" in about


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no task is given: name some"),
        (["--tasks", " , "], "no task is given: name some"),
        (["--tasks", "locl"], "unknown task 'locl': did you mean local?"),
        (["--tasks", "xyz"], "unknown task 'xyz': list all with `lm-eval ls tasks`"),
        (["--tasks", "broken"], "lm-eval cannot prepare broken: FileNotFoundError: rows.jsonl"),
        (["--tasks", "local", "--limit", "0"], "--limit 0: give a number above 0"),
        (["--tasks", "local", "--num-fewshot", "-1"], "--num-fewshot -1: give a number above -1"),
        (["--tasks", "local", "--include-path", "none"], "is no folder: give one with YAML"),
        (["--tasks", "local", "--out", "none/out.json"], "give --out FILE in one that exists"),
        (["--tasks", "local", "--dtype", "fp7"], "unknown --dtype 'fp7'"),
        (["--tasks", "local", "--layout", "tp=3"], "neither divides the 2 KV heads"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else None,
)
def test_bad_words_of_an_evaluation_exit_with_2(
    folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    done = in_fork(["eval", str(folder), *words], tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not done.stdout


@pytest.mark.usefixtures("stand_in")
def test_a_folder_that_is_no_model_is_not_evaluated(tmp_path: Path) -> None:
    done = in_fork(["eval", str(tmp_path), "--tasks", "local"], tmp_path)
    assert done.returncode == 2 and "is neither a run (plan.toml) nor" in done.stderr


def test_a_missing_package_is_named_with_its_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = in_fork(["eval", str(folder), "--tasks", "local"], tmp_path)
    assert done.returncode == 2 and "pip install 'fivefold[eval]'" in done.stderr


WORDS = "task: local_{kind}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {rows}\n"
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
    "doc_to_target: '{{answer}}'\ndoc_to_choice: '{{choices}}'\nmetric_list:\n  - metric: acc\n",
    "write": "output_type: generate_until\ndoc_to_text: '{{question}}'\n"
    "doc_to_target: '{{written}}'\ngeneration_kwargs:\n  until: ['w7']\n  max_gen_toks: 4\n"
    "metric_list:\n  - metric: exact_match\n",
    "roll": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: word_perplexity\n",
}


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_the_package_evaluates_tasks_of_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ours, rows = asked_in(folder, "dp=1"), list[dict[str, Any]]()
    for i in range(6):
        question = " ".join(f"w{(5 * i + j) % 40}" for j in range(4))
        (written,) = ours.generate_until([(question, {"max_gen_toks": 4, "until": "w7"})])
        choices = [f"w{i} w3", f"w{i + 9}"]
        other = written if i % 2 else "w0"
        text = f"w{i} w3 w4"
        row = {"question": question, "choices": choices, "answer": i % 2, "written": other}
        rows.append({**row, "text": text})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, text in TASKS.items():
        head = WORDS.format(kind=kind, rows=tmp_path / "rows.jsonl")
        (tmp_path / f"{kind}.yaml").write_text(f"{head}test_split: test\n{text}")
    words = ["eval", str(folder), "--tasks", "local_choice,local_write,local_roll", "--json"]
    words += ["--include-path", str(tmp_path), "--layout", "dp=2 tp=2", "--dtype", "float64"]
    done = in_new_process(words, tmp_path)
    assert done.returncode == 0, done.stderr
    tasks = json.loads(done.stdout)["tasks"]
    pairs = [(row["question"], f" {choice}") for row in rows for choice in row["choices"]]
    scores = [logprob for logprob, _ in expected(folder, pairs)]
    right = [(scores[2 * i + 1] > scores[2 * i]) == (i % 2) for i in range(6)]
    assert tasks["local_choice"]["metrics"]["acc"]["value"] == pytest.approx(sum(right) / 6)
    assert tasks["local_write"]["metrics"]["exact_match"]["value"] == pytest.approx(0.5)
    whole = sum(logprob for logprob, _ in expected(folder, [("", row["text"]) for row in rows]))
    perplexity = tasks["local_roll"]["metrics"]["word_perplexity"]["value"]
    assert perplexity == pytest.approx(2.718281828459045 ** (-whole / 18), rel=1e-6)
    assert {each["samples"] for each in tasks.values()} == {6}
