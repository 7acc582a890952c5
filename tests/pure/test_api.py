"""`import fivefold as ff`: what is there, that it is documented, and that commands answer alike."""

from __future__ import annotations

import dataclasses
import doctest
import html.parser
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.cli import main
from fivefold.commands.schedule import TimedSchedule
from fivefold.commands.search import PlannedJob, SearchedPlans
from fivefold.core.errors import JSON_SCHEMA
from fivefold.core.model import presets as models
from fivefold.render import notebook as notebook_html
from tests.api_page import LONG, sections

HOSTILE = '<script>alert("x")</script>&'
JOB = {"gpus": 8, "machine": "h100", "seq": 4096}
SMALL = {"gpus": 4, "machine": "h100", "seq": 128, "batch": 16}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


def printed_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Without the version of its keys, which the command line adds."""
    table = json.loads(printed(capsys, *words, "--json"))
    assert table.pop("schema_version") == JSON_SCHEMA
    return table


def answers(answer: Any, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """The command prints what the function returns, as JSON and as text, but for its seconds."""
    table = printed_json(capsys, *words)
    ours = json.loads(json.dumps(answer.to_json()))
    assert table.keys() == ours.keys()
    assert {**table, "seconds": 0} == {**ours, "seconds": 0}
    lines = re.sub(r"in [0-9.]+ s;", "in X s;", printed(capsys, *words)).rstrip()
    assert lines == re.sub(r"in [0-9.]+ s;", "in X s;", str(answer)).rstrip()


def test_the_plan_command_prints_what_plan_returns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "tiny-moe", "--layout", "dp=2 tp=2 ep=2", "--zero", "1"]
    answers(ff.plan("tiny-moe", layout="dp=2 tp=2 ep=2", zero=1), capsys, *words)
    keys = {"layout": "dp=8", "machine": "h100", "tokens": 1e12, "price": 2.0, "seq": 4096}
    price = keys.pop("price")
    words = ["plan", "llama-3.1-8b", *(f"--{key}={value}" for key, value in keys.items())]
    words += ["--set", f"price={price}"]
    keys["price"] = price
    answers(ff.plan("llama-3.1-8b", **keys), capsys, *words)


def test_the_plan_command_prints_what_search_returns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "tiny-moe", *(f"--{key}={value}" for key, value in SMALL.items())]
    found = ff.search("tiny-moe", top=3, fix={"zero": 2}, schedule="1f1b", **SMALL)
    more = ("--set", "top=3", "--set", "fix=zero=2", "--schedule", "1f1b")
    answers(found, capsys, *words, *more)
    assert ff.plan("tiny-moe", **SMALL).plan == ff.search("tiny-moe", **SMALL).plan


def test_the_schedule_command_prints_what_schedule_returns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("schedule", "zb-v", "--stages", "4", "--microbatches", "8", "--times", "1,2,1")
    found = ff.schedule("zb-v", stages=4, microbatches=8, times=(1, 2, 1))
    assert printed_json(capsys, *words) == json.loads(json.dumps(found.to_json()))
    assert found.lines()[0] in printed(capsys, *words)


def test_every_name_is_documented() -> None:
    page = dict(sections())
    for name in ff.__all__:
        titles = [title for title in page if re.search(rf"ff\.{name}\b", title)]
        titles = titles or ["Errors"]
        assert any(f"ff.{name}" in page[title] for title in titles), name
        assert callable(getattr(ff, name)) and getattr(ff, name).__doc__
    assert not set(re.findall(r"\bff\.([A-Za-z_]+)", "".join(page.values()))) - set(ff.__all__)


@pytest.mark.parametrize("name", [each for each in ff.__all__ if each[0].islower()])
def test_signatures_are_documented(name: str) -> None:
    found = inspect.signature(getattr(ff, name)).parameters.values()
    page = " ".join("".join(text for _, text in sections()).split())
    said = re.search(rf"`ff\.{name}\(([^`]*)\) →", page)
    assert said is not None
    usual = {each.name: each.default for each in found if each.default is not each.empty}
    for each in found:
        shown = f"**{each.name}" if each.kind is each.VAR_KEYWORD else each.name
        if each.name in usual:
            shown += (
                f"={json.dumps(usual[each.name])}"
                if isinstance(usual[each.name], str)
                else (f"={usual[each.name]!r}")
            )
        if each.name == "machine" and name == "machine":
            shown = "name"
        assert re.search(rf"(^|\W){re.escape(shown)}(,|$)", said[1]), f"{shown} of ff.{name}"


@pytest.mark.parametrize("title", [title for title, _ in sections() if title not in LONG])
def test_the_examples_of_the_page_work(title: str) -> None:
    text = dict(sections())[title]
    parser = doctest.DocTestParser()
    test = parser.get_doctest(text, {"ff": ff}, title, "docs/python.md", 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys, fivefold\n"
        "more = [name for name in sys.modules if name.startswith('fivefold.')]\n"
        "assert not more and 'torch' not in sys.modules, more\n"
        "fivefold.plan('tiny', layout='dp=2')\n"
        "assert 'typer' not in sys.modules\n"
        "fivefold.schedule('1f1b', stages=2, microbatches=4)\n"
        "loaded = {'torch', 'numpy'} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_function_keeps_its_name_beside_the_room() -> None:
    import fivefold.records.run_writer  # noqa: F401, binds the room `records`
    from fivefold.verify.compare import FORMULA

    assert FORMULA and inspect.isfunction(ff.verify) and inspect.ismodule(ff.records)  # type: ignore[attr-defined]
    assert set(ff.__all__) <= set(dir(ff))
    with pytest.raises(AttributeError, match="no attribute 'verfy'"):
        _ = ff.verfy  # type: ignore[attr-defined]


def test_answers_do_not_change() -> None:
    for kind in (PlannedJob, SearchedPlans, TimedSchedule):
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ff.plan("tiny").seconds = 1.0  # type: ignore[misc]


def test_progress_is_told() -> None:
    told: list[Any] = []
    ff.search("tiny", **SMALL, on_progress=told.append)
    shares = [each.done / each.total for each in told]
    assert shares and shares == sorted(shares) and shares[-1] <= 1.0


def test_a_shape_of_ones_own_travels_in_a_plan_file(tmp_path: Path) -> None:
    mine = dataclasses.replace(ff.shape("tiny-moe"), name="mine", layers=3)
    planned = ff.plan(mine, layout=ff.Layout(shard=2, tp=2, zero=1), lr=2e-4)
    planned.to_toml(tmp_path / "plan.toml")
    again = ff.plan(tmp_path / "plan.toml")
    assert again.plan == planned.plan and again.plan.shape.name == "mine"
    assert again.plan.layout.zero == 1 and again.plan.options.train.lr == 2e-4
    assert models.load(models.to_text(mine)) == mine


def test_a_model_is_what_people_have(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config |= {"vocab_size": 256, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (config, tmp_path, tmp_path / "config.json", ff.shape(config)):
        assert ff.plan(model).plan.shape.layers == 2
    plan = ff.plan("tiny", layout="dp=2").plan
    assert ff.plan(plan, layers=6).plan.shape.layers == 6
    assert ff.plan(ff.plan(plan)).plan == plan
    with pytest.raises(ff.FivefoldError, match="a model of type int"):
        ff.plan(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"learning_rate": 1e-3}, "did you mean lr"),
        ({"seq": "long"}, "seq = 'long': expected int"),
        ({"layout": ff.Layout(tp=2), "zero": 1}, "a Layout says its zero"),
        ({"layers": 3, "set": {"layers": 4}}, "layers is given twice"),
        ({"gpus": 0}, "--gpus 0"),
        ({"machine": "{}"}, "missing key 'name'"),
        ({"gpus": 8}, "a search needs the machine"),
    ],
)
def test_bad_keywords_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ff.FivefoldError, match=re.escape(said)):
        ff.plan("tiny", **keys)


def test_a_search_refuses_a_layout() -> None:
    with pytest.raises(ff.FivefoldError, match="a search chooses the layout"):
        ff.search("tiny", layout="dp=8", gpus=8, machine="h100")
    with pytest.raises(ff.FivefoldError, match="gather is for a given layout"):
        ff.search("tiny", gpus=8, machine="h100", gather="step")


class Tags(html.parser.HTMLParser):
    """Every tag that is opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in ("rect", "path", "br", "polyline") or not self.get_starttag_text().endswith(  # type: ignore[union-attr]
            "/>"
        ):
            self.open += [] if tag == "br" else [tag]

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(text: str) -> set[str]:
    parser = Tags()
    parser.feed(text)
    assert not parser.open
    return parser.seen


def test_answers_show_themselves_in_notebooks() -> None:
    planned, found = (
        ff.plan("llama-3.1-8b", layout="dp=8", machine="h100"),
        ff.search("llama-3.1-8b", top=2, **JOB),
    )
    timed = ff.schedule("1f1b", stages=2, microbatches=4)
    for answer in (planned, found, timed):
        assert "svg" in tags(answer._repr_html_())
    assert planned.estimate is not None
    shown = planned._repr_html_()
    for name, size in planned.estimate.memory.items():
        assert size <= 0 or f"{name} {size / 2**30:,.1f} GiB" in shown
    assert "dp 8 · cp 1" in tags_free(shown) and str(found.plan.layout) in found._repr_html_()
    assert "svg" not in tags(ff.plan("tiny")._repr_html_())


def tags_free(text: str) -> str:
    return html.unescape(re.sub("<[^>]*>", " ", text))


def test_what_is_shown_is_escaped() -> None:
    named = dataclasses.replace(ff.shape("llama-3.2-1b"), name=HOSTILE)
    planned = ff.plan(named, layout="dp=8", machine="h100", seq=2048)
    for shown in (
        planned._repr_html_(),
        ff.plan(named)._repr_html_(),
        ff.search(named, top=1, **JOB)._repr_html_(),
        notebook_html.text_html(HOSTILE, True),
        notebook_html.schedule_html(None, [HOSTILE]),
        notebook_html.texts_html([(HOSTILE, HOSTILE, HOSTILE)]),
        notebook_html.run_html((2.0, 1.0), [HOSTILE], HOSTILE, False),
    ):
        assert "script" not in tags(shown) and HOSTILE in tags_free(shown)
