"""Answers as HTML, which a notebook shows."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.core.plan import Plan
from fivefold.render.checks import WORDS
from fivefold.render.plan import headline, ranking, readings, search_notes, step_text
from fivefold.render.text import duration, gib

if TYPE_CHECKING:
    from fivefold.planner import Estimate, PlanResult

_WIDTH, _HEIGHT, _LABELS = 720, 26, 5
_COLOURS = (
    *("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d"),
    *("#bab0ac", "#ff9da6"),
)
_GOOD, _BAD = "#2e8b57", "#d1495b"
_MOST_STEPS = 12  # lines of a run


def _e(value: object) -> str:
    return html.escape(str(value))


def _box(*parts: str) -> str:
    return f'<div style="max-width:{_WIDTH + 480}px;overflow-x:auto">{"".join(parts)}</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} style="text-align:{"left" if i in left else "right"};padding:2px 10px">'
            f"{_e(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    top = f"<thead><tr>{cells(heads, 'th')}</tr></thead>" if any(heads) else ""
    style = f"border-collapse:collapse;font-size:13px;white-space:{'nowrap' if heads else 'normal'}"
    return f'<table style="{style}">{top}<tbody>{body}</tbody></table>'


def _verdict(good: bool, text: str) -> str:
    colour = _GOOD if good else _BAD
    return f'<p><strong style="color:{colour}">{_e(text)}</strong></p>'


def _lines(lines: Sequence[str], title: str = "") -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{_e(line)}</li>" for line in lines)
    head = f"<p><strong>{_e(title)}</strong></p>" if title else ""
    return f"{head}<ul>{items}</ul>"


def shares_svg(
    name: str, parts: Mapping[str, float], limit: float, texts: Mapping[str, str]
) -> str:
    """A bar of parts, each with its colour, name and amount; a line where the limit is."""
    total = max(limit, sum(parts.values()))
    shown = [(part, size) for part, size in parts.items() if size > 0]
    rows = -(-len(shown) // _LABELS)
    height = _HEIGHT + 12 + 18 * rows
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_e(name)}" '
            'style="max-width:100%;height:auto;font:11px system-ui,sans-serif">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#88888833"/>',
            *_shares(shown, total, texts),
            f'<path d="M{_WIDTH * limit / total:.1f} 0V{_HEIGHT + 4}" stroke="{_BAD}" '
            'stroke-width="2"/>',
            "</svg>",
        ]
    )


def _shares(
    shown: Sequence[tuple[str, float]], total: float, texts: Mapping[str, str]
) -> Iterator[str]:
    x = 0.0
    for i, (part, size) in enumerate(shown):
        width, colour = _WIDTH * size / total, _COLOURS[i % len(_COLOURS)]
        title = _e(f"{part} {texts[part]}")
        yield (
            f'<rect x="{x:.1f}" width="{width:.1f}" height="{_HEIGHT}" fill="{colour}">'
            f"<title>{title}</title></rect>"
        )
        left, top = i % _LABELS * (_WIDTH // _LABELS), _HEIGHT + 12 + 18 * (i // _LABELS)
        yield f'<rect x="{left}" y="{top}" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{left + 14}" y="{top + 9}" fill="currentColor">{title}</text>'
        x += width


def memory_svg(estimate: Estimate) -> str:
    """The memory of the fullest rank by category; the line is what a GPU has."""
    limit = estimate.setting.machine.memory
    parts = {**estimate.memory, "free": max(0.0, limit - estimate.total)}
    return shares_svg(
        "memory", estimate.memory, limit, {key: gib(size) for key, size in parts.items()}
    )


def step_svg(estimate: Estimate) -> str:
    """A step by what it is spent on."""
    parts = estimate.breakdown()
    return shares_svg(
        "step", parts, estimate.step, {key: duration(time) for key, time in parts.items()}
    )


def plan_html(plan: Plan, estimate: Estimate | None, why: Sequence[str]) -> str:
    """A plan: with a machine its memory and its step as bars, and the reasons."""
    facts = [
        ("model", plan.shape.name),
        *(("layout", reading) for reading in readings(plan)),
        ("", f"ZeRO-{plan.layout.zero}, schedule {plan.options.schedule}, {plan.precision}"),
        ("batch", str(plan.batch)),
    ]
    if estimate is None:
        return _box(_table((), facts, (0, 1)), _lines(plan.notes, "notes"))
    speed = f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {estimate.mfu:.1%}"
    facts += [("step", f"{step_text(estimate)}: {speed}")]
    return _box(
        _table((), facts, (0, 1)),
        *_bars(estimate),
        _lines(why, "why"),
        _lines(estimate.plan.notes, "notes"),
    )


def _bars(estimate: Estimate) -> Iterator[str]:
    """Memory and step of an estimate."""
    limit = gib(estimate.setting.machine.memory)
    text = f"{gib(estimate.total)} of {limit} on the fullest rank: {estimate.verdict}"
    yield _verdict(estimate.verdict == "fits", text)
    yield memory_svg(estimate)
    yield f"<p>step {_e(duration(estimate.step))}</p>"
    yield step_svg(estimate)


def search_html(result: PlanResult, why: Sequence[str]) -> str:
    """The ranking as a table, and the memory and the step of the first choice."""
    first = result.plans[0]
    fastest = result.fastest.step
    return _box(
        *(f"<p>{_e(line)}</p>" for line in headline(result)),
        _table(*ranking(result.plans, fastest)),
        f"<p><strong>first</strong>: {_e(first.plan.batch)}</p>",
        *_bars(first),
        _lines(why, "why"),
        _lines([*search_notes(result), *first.plan.notes], "notes"),
    )


def verdict_html(table: Mapping[str, Any]) -> str:
    """Errors beside tolerances, and whether the collectives were those predicted."""
    passed = "PASS" if table["passed"] else "FAIL"
    text = f"{passed}: {table['model']} on {table['layout']}, {table['world']} ranks"
    head = _verdict(bool(table["passed"]), f"{text} in {table['seconds']:.1f} s")
    if "traffic" not in table:
        most = "none" if table["tolerance"] is None else f"{table['tolerance']:.1e}"
        rows = [(mode, f"{error:.1e}", most) for mode, error in table["errors"].items()]
        heads = ("", "largest error of logits", "tolerance")
        return _box(head, _table(heads, rows), _lines(table["notes"], "notes"))
    rows = [
        (word, f"{table[name]:.1e}", f"{table['tolerance'][name]:.1e}")
        for name, word in WORDS.items()
    ]
    matched = "as predicted" if table["traffic"]["match"] else "not as predicted"
    calls = sum(row["count"] for row in table["traffic"]["observed"])
    traffic = f"{calls:,} collectives of rank {table['traffic']['rank']}: {matched}"
    heads = ("", "largest error", "tolerance")
    return _box(head, _table(heads, rows), f"<p>{_e(traffic)}</p>", _lines(table["notes"], "notes"))


def schedule_html(svg: str | None, lines: Sequence[str]) -> str:
    """The picture of a schedule and its reasons; without the picture if it is too large."""
    drawn = svg or "<p>too many steps for a picture in a notebook</p>"
    return _box(drawn, _lines(lines))


def run_html(losses: Sequence[float], steps: Sequence[str], text: str, passed: bool) -> str:
    """The losses of a run as a curve, its last steps, and its summary."""
    last = [_e(line) for line in steps[-_MOST_STEPS:]]
    return _box(
        _curve(losses),
        f"<pre>{'<br>'.join(last)}</pre>",
        _pre(text),
        "" if passed else _verdict(False, "the losses are not those of one process"),
    )


def texts_html(texts: Sequence[tuple[str, str, str]]) -> str:
    """Prompts and what was written after them, and why each ended."""
    rows = "".join(
        f"<p>{_e(prompt)}<mark>{_e(text)}</mark> <small>({_e(reason)})</small></p>"
        for prompt, text, reason in texts
    )
    return _box(rows)


def _curve(losses: Sequence[float]) -> str:
    """The loss of every step."""
    if len(losses) < 2:
        return ""
    low, high = min(losses), max(losses)
    scale = 100 / (high - low or 1.0)
    places = (
        f"{40 + i * (_WIDTH - 60) / (len(losses) - 1):.1f},{10 + (high - loss) * scale:.1f}"
        for i, loss in enumerate(losses)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="140" role="img" '
        f'viewBox="0 0 {_WIDTH} 140" aria-label="loss of {len(losses)} steps" '
        'style="max-width:100%;height:auto;font:11px system-ui,sans-serif">'
        f'<polyline points="{" ".join(places)}" fill="none" stroke="{_COLOURS[0]}" '
        'stroke-width="2"/>'
        f'<text x="0" y="14" fill="currentColor">{high:.3f}</text>'
        f'<text x="0" y="114" fill="currentColor">{low:.3f}</text>'
        f'<text x="40" y="134" fill="currentColor">loss, step 1</text>'
        f'<text x="{_WIDTH - 20}" y="134" text-anchor="end" fill="currentColor">'
        f"step {len(losses)}</text></svg>"
    )


def _pre(text: str) -> str:
    return f"<pre>{_e(text)}</pre>"


def text_html(text: str, passed: bool) -> str:
    """An answer that is a text."""
    return _box(_verdict(passed, "PASS" if passed else "FAIL"), _pre(text))
