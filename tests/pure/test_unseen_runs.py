"""Runs that no number was fitted to: the stated errors hold, and the page has what is computed."""

from __future__ import annotations

from statistics import median

from fivefold.planner.error_bars import accuracy
from tests import unseen_published


def test_stated_errors_hold_for_runs_that_were_not_seen() -> None:
    """Half of them within the stated median, nine in ten within the ninth tenth."""
    errors, stated = [unseen_published.error(run) for run in unseen_published.scored()], accuracy()
    assert median(errors) < stated.time
    assert sum(each <= stated.time_p90 for each in errors) >= 0.9 * len(errors)


def test_the_page_has_the_table() -> None:
    text = unseen_published.DOC.read_text("utf-8")
    between = text.partition(unseen_published.BEGIN)[2].partition(unseen_published.END)[0]
    assert between.strip().splitlines() == unseen_published.written()
