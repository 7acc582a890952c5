"""The page as one text: live, beside a server, or whole, with all that it needs inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fivefold import __version__
from fivefold.core.errors import FivefoldError
from fivefold.report.page.questions import LESSONS

STATIC = Path(__file__).parent / "static"
INSTALL = "pip install 'fivefold[page]'"
_OTHERS = "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'"
_PREFIX = "fivefold/"


class Start(NamedTuple):
    """With what a page opens: its address, the job of Explore, and the folder of a run, or ""."""

    address: str
    job: Mapping[str, str]
    run: str


def live(start: Start) -> tuple[str, str]:
    """The page of a server, and the policy that keeps other scripts from running in it."""
    modules = {_PREFIX + path.name: f"/static/{path.name}" for path in _modules()}
    names = json.dumps({"imports": modules})
    digest = base64.b64encode(hashlib.sha256(names.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; connect-src 'self'; {_OTHERS}; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    head = "\n".join(f'<link rel="stylesheet" href="/static/{path.name}">' for path in _sheets())
    scripts = [
        _data("site", json.dumps(_facts(start, live=True))),
        f'<script type="importmap">{names}</script>',
        '<script src="/plotly.js"></script>',
        '<script type="module" src="/static/main.js"></script>',
    ]
    return _page(head, scripts), policy


def whole(start: Start, answers: Mapping[str, Any], command: str) -> str:
    """A page that opens without a server, with every answer that it can show."""
    policy = f"default-src 'none'; script-src 'unsafe-inline' data:; {_OTHERS}"
    modules = {_PREFIX + path.name: _inline(path) for path in _modules()}
    packed = gzip.compress(json.dumps(answers).encode(), mtime=0)
    facts = _facts(start, live=False) | {"command": command}
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{''.join(path.read_text('utf-8') for path in _sheets())}</style>"
    )
    scripts = [
        _data("site", json.dumps(facts)),
        _data("answers", base64.b64encode(packed).decode()),
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>',
        f"<script>{_closed(plotly().read_text('utf-8'))}</script>",
        f'<script type="module">import "{_PREFIX}main.js";</script>',
    ]
    return _page(head, scripts)


def plotly() -> Path:
    """The charting library, from where it is installed."""
    spec = find_spec("plotly")
    places = (spec.submodule_search_locations if spec else None) or []
    for place in places:
        path = Path(place) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise FivefoldError(f"the page draws with Plotly, which is not installed: {INSTALL}")


def _facts(start: Start, *, live: bool) -> dict[str, Any]:
    lessons = {
        name: {
            "title": module.TITLE,
            "choices": {each: vars(choice) for each, choice in module.CHOICES.items()},
        }
        for name, module in LESSONS.items()
    }
    return {
        "live": live,
        "run": start.run,
        "start": start.address,
        "job": dict(start.job),
        "version": __version__,
        "lessons": lessons,
    }


def _page(head: str, scripts: list[str]) -> str:
    text = (STATIC / "page.html").read_text("utf-8")
    return text.replace("{{head}}", head).replace("{{scripts}}", "\n".join(scripts))


def _sheets() -> list[Path]:
    """The page's own sheet comes first: those of its parts build on it."""
    return sorted(STATIC.glob("*.css"), key=lambda path: (path.name != "page.css", path.name))


def _modules() -> list[Path]:
    return sorted(STATIC.glob("*.js"))


def _inline(path: Path) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _data(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{_closed(text)}</script>'


def _closed(text: str) -> str:
    """Nothing inside of a script may look like its end; in strings `\\/` is `/`."""
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")
