"""What a step is spent on, by the busiest rank.

{"headline", "step", "parts": {name: seconds}, "words": {name: what it is}}
"""

from __future__ import annotations

from typing import Any

from fivefold.core.estimate.outlook import Outlook
from fivefold.report.amounts import duration
from fivefold.report.lines import bar

View = dict[str, Any]
_WORDS = {
    "compute": "matrix products, attention and what lies between them",
    "launch": "the host starts kernels more slowly than the GPU ends them",
    "bubble": "the rank waits for others of its pipeline",
    "tp": "tensor collectives that no compute hides",
    "cp": "keys and values of other context ranks, as far as attention does not hide them",
    "ep": "tokens on their way to experts and back",
    "pp": "messages between stages while the pipeline fills and drains",
    "dp": "gradients and weights among data ranks that no compute hides",
    "optimizer": "the update of the weights",
    "offload": "the way to host memory and back",
    "fixed": "what every step costs, whatever its size",
}


def view(found: Outlook) -> View:
    """The step by what it is spent on; what is nothing is left out."""
    parts = found.breakdown()
    return {
        "headline": f"{duration(found.step)} a step, of which compute is "
        f"{parts.get('compute', 0.0) / found.step:.1%}",
        "step": found.step,
        "parts": parts,
        "words": {name: _WORDS[name] for name in parts},
    }


def text(found: View) -> list[str]:
    """The same for a terminal."""
    lines = [f"step      {found['headline']}"]
    for name, seconds in found["parts"].items():
        lines.append(bar(name, duration(seconds), seconds / found["step"]))
    return lines
