"""The verdict of a verification as text: errors beside tolerances, predicted beside observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.core import counted
from fivefold.core.plan import Plan
from fivefold.cost.traffic import TrafficEntry

WORDS = {
    "loss_err": "loss",
    "grad_err": "gradients",
    "norm_err": "gradient norm",
    "clip_err": "clip coefficient",
    "weight_err": "weights",
}


def render(plan: Plan, options: Mapping[str, Any], table: Mapping[str, Any], formula: str) -> str:
    """The verdict as text; `formula` says how the tolerances come about."""
    lines = [
        f"{table['model']} on {table['layout']}, ZeRO-{table['zero']}, {options['dtype']}: "
        f"{counted(table['world'], 'rank')} against one process, "
        f"{counted(options['steps'], 'step')} of {options['optimizer']}",
        f"{plan.batch}",
        "",
        f"{'':<18}{'largest error':>14}{'tolerance':>12}",
        *(
            f"{word:<18}{table[name]:>14.1e}{table['tolerance'][name]:>12.1e}"
            f"{'' if table[name] <= table['tolerance'][name] else '   too large'}"
            for name, word in WORDS.items()
        ),
        formula,
        "",
        *_traffic_lines(table["traffic"]),
        "",
        *(f"note: {note}" for note in table["notes"]),
    ]
    if "flips" in table:
        lines.append(f"values rounded to another fp8 number (flips): {table['flips']}")
    if table["diverges_at"] is not None:
        lines.append(f"first difference, in forward order: {table['diverges_at']}")
    if table["disorder"] is not None:
        lines.append(f"flat units in different orders: {table['disorder']}")
    verdict = "PASS" if table["passed"] else "FAIL"
    return "\n".join([*lines, f"{verdict} in {table['seconds']:.1f} s"])


def _traffic_lines(traffic: Mapping[str, Any]) -> Iterator[str]:
    """One line for each kind of collective, predicted and observed."""
    calls: dict[tuple[Any, ...], dict[str, int]] = {}
    for source in ("predicted", "observed"):
        for row in traffic[source]:
            entry = TrafficEntry(**row)
            key = (entry.axis, entry.kind, entry.bytes, entry.group)
            calls.setdefault(key, {"predicted": 0, "observed": 0})[source] = entry.count
    if not calls:
        yield "collectives: none predicted, none observed"
        return
    yield f"{'collectives of rank ' + str(traffic['rank']):<34}{'bytes':>10}{'ranks':>7}" + (
        f"{'predicted':>11}{'observed':>10}"
    )
    for (axis, kind, size, group), counts in sorted(calls.items()):
        mark = "" if counts["predicted"] == counts["observed"] else "   differs"
        yield (
            f"{axis:<16}{kind:<18}{size:>10,}{group:>7}"
            f"{counts['predicted']:>11}{counts['observed']:>10}{mark}"
        )


def render_generated(table: Mapping[str, Any]) -> str:
    """The verdict on generation as text."""
    same = "the same" if table["tokens_equal"] else "DIFFERENT"
    most = "none" if table["tolerance"] is None else f"{table['tolerance']:.1e}"
    lines = [
        f"{table['model']} on {table['layout']}, {table['dtype']}: generation against the forward "
        "of the whole text on one device",
        "",
        f"{'':<18}{'largest error of logits':>24}{'tolerance':>12}",
        *(f"{mode:<18}{error:>24.1e}{most:>12}" for mode, error in table["errors"].items()),
        f"log-probabilities: largest error {table['logprob_err']:.1e}; against the training "
        f"forward in {table['trained_layout']} {table['trained_err']:.1e}",
        *_batch_lines(table),
        f"{table['tokens']:,} tokens, {same} every way; {table['reused']:,} from shared blocks, "
        f"{counted(table['preempted'], 'preemption')}",
        *(f"note: {note}" for note in table["notes"]),
        f"{'PASS' if table['passed'] else 'FAIL'} in {table['seconds']:.1f} s",
    ]
    return "\n".join(lines)


def _batch_lines(table: Mapping[str, Any]) -> Iterator[str]:
    bound = table["batch_bound"]
    bound_text = "none" if bound is None else f"{bound:.1e}" if bound else "0, batch-invariant"
    yield f"between batches: largest difference {table['batch_diff']:.1e} (bound: {bound_text})"
    if table["batch_cost"] is not None:
        yield f"batch invariance: {table['batch_cost']:.1f} times the time without it"
    if table["tolerance"] is None:
        yield "no tolerance: bfloat16 may choose other experts than the plain forward"
