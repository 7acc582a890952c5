"""Every preset on every machine over the page's answers, and in its file, without a browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fivefold import cli
from fivefold.core import hardware as machine
from fivefold.core.errors import FivefoldError
from fivefold.core.model import presets as models
from fivefold_page import document
from fivefold_page.explore import explore
from fivefold_page.explore.state import State
from tests.pure.test_page_jobs import arrive
from tests.selection import all_cases, shuffled

_CHANGES = 24
PAIRS = [*product(models.presets(), machine.presets())]


def sound(answer: dict[str, Any]) -> None:
    """No panel failed, and a browser can read every number."""
    parts = {name: part for name, part in answer.items() if isinstance(part, dict)}
    assert not {name: part["failed"] for name, part in parts.items() if "failed" in part}
    json.dumps(answer, allow_nan=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "name"), PAIRS)
def test_every_model_on_every_machine_has_all_its_panels(model: str, name: str) -> None:
    node = machine.load(name).gpus_per_node
    params = arrive({"model": model, "machine": name, "gpus": str(node)}).params()
    view = explore.view(params)
    assert view["problem"] is None
    parts = view | explore.pictures(params)
    sound(parts)
    for each in set(explore.PANELS) - set(explore.searches()):
        assert explore.PANELS[each].text(parts[each])


def test_models_with_another_mixer_have_all_their_panels() -> None:
    """Whatever is drawn: their sizes at many lengths come from a class that knows one."""
    hybrid = [name for name in models.presets() if models.load(name).hybrid is not None]
    params = {"gpus": "64", "tp": "4", "pp": "1", "ep": "16", "batch": "64", "schedule": "1f1b"}
    for name in hybrid:
        view = explore.view(params | {"model": name})
        assert view["problem"] is None
        sound(view | explore.pictures(params | {"model": name}))
    assert hybrid


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("model", models.presets())
def test_every_model_is_written_to_a_file(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Explore's answers only, for the lessons are the same in all files; in `make test` with
    some of the states that are one change away."""
    neighbours = document._neighbours

    def some(*job: Any) -> list[document.Question]:
        first, *others = neighbours(*job)
        return [first, *(others if all_cases() else shuffled(others)[:_CHANGES])]

    monkeypatch.setattr(document, "_lesson_questions", lambda: ())
    monkeypatch.setattr(document, "_neighbours", some)
    path = tmp_path / "page.html"
    with redirect_stdout(StringIO()):
        assert not cli.run(["observe", model, "--html", str(path)])
    packed = re.search(r'id="answers">(.*?)</script>', path.read_text("utf-8"), re.S)
    assert packed is not None
    answers = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert len(answers) > _CHANGES
    for answer in answers.values():
        assert "error" not in answer
        sound(answer)


@pytest.mark.parametrize("error", [TypeError("an array"), FivefoldError("too long to draw")])
def test_a_panel_that_fails_says_so_and_takes_no_other_with_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(state: State) -> dict[str, Any]:
        raise error

    for name in ("memory", "traffic"):
        monkeypatch.setitem(explore.PANELS, name, explore.PANELS[name]._replace(view=fail))
    view, pictures = explore.view({}), explore.pictures({})
    assert str(error) in view["memory"]["failed"] and str(error) in pictures["traffic"]["failed"]
    assert view["problem"] is None
    sound({name: part for name, part in view.items() if name != "memory"})
    sound({name: part for name, part in pictures.items() if name != "traffic"})
    lines = "\n".join(document.lines({"explore": view | pictures}, None))
    assert f"memory: {view['memory']['failed']}" in lines
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, TypeError)
