"""The notebook of the examples: it runs in a real kernel, and is committed without outputs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
SHOWN = ("<svg", "<table")


def cells(kind: str) -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def test_the_notebook_has_no_outputs_and_only_our_names() -> None:
    for cell in cells("code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        source = "".join(cell["source"])
        ast.parse(source)
        assert set(re.findall(r"\bff\.(\w+)", source)) <= set(ff.__all__)
    for cell in cells("markdown"):
        for link in re.findall(r"\]\((\S+)\)", "".join(cell["source"])):
            assert (NOTEBOOK.parent / link).exists(), link


@pytest.mark.sample(0.1)
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Two searches, 17 processes that verify, and two that train: two minutes on busy cores."""
    why = "needs a kernel: pip install 'fivefold[notebook]'"
    nbformat = pytest.importorskip("nbformat", reason=why)
    nbclient = pytest.importorskip("nbclient", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    notebook = nbformat.read(NOTEBOOK, 4)
    where = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=where)
    client.execute()  # raises what a cell raises
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out["output_type"] in ("stream", "error")]
    shown = [out["data"]["text/html"] for out in outputs if "text/html" in out["data"]]
    assert len(shown) == 5 and all(any(tag in html for tag in SHOWN) for html in shown)
