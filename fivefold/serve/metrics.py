"""Numbers of a server as Prometheus reads them: counters, gauges and histograms in plain text."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60)
GONE = 499  # as logs have it: the client has closed the connection
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """A Prometheus histogram."""

    def __init__(self, name: str, help: str, bounds: Sequence[float] = _SECONDS) -> None:
        self.name, self.help, self.bounds = name, help, tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help, "histogram")
        below = 0
        for bound, number in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            below += number
            yield f'{self.name}_bucket{{le="{bound}"}} {below}'
        yield f"{self.name}_sum {self.total}"
        yield f"{self.name}_count {below}"


class ServeMetrics:
    """Counters and histograms of a server."""

    def __init__(self) -> None:
        self.requests: Counter[Labels] = Counter()
        self.prompt_tokens = self.output_tokens = self.broken_off = 0
        self.num_moved = self.moved_bytes = self.restarts = self.retried = self.num_lost = 0
        self.ttft = Histogram("fivefold_ttft_seconds", "From a request to its first token.")
        self.tpot = Histogram("fivefold_tpot_seconds", "Between two tokens, in the mean.")
        self.latency = Histogram("fivefold_request_seconds", "From a request to its last token.")

    def begun(self, prompt_tokens: int) -> None:
        """Count a call."""
        self.prompt_tokens += prompt_tokens

    def drew(self, tokens: int) -> None:
        """Count drawn tokens."""
        self.output_tokens += tokens

    def moved(self, sequences: int, num_bytes: int) -> None:
        """Count sequences sent to another engine."""
        self.num_moved += sequences
        self.moved_bytes += num_bytes

    def restarted(self) -> None:
        """Count a restart of an engine."""
        self.restarts += 1

    def lost(self, again: bool) -> None:
        """Count a sequence of a lost engine."""
        self.retried += again
        self.num_lost += not again

    def answered(
        self, path: str, status: int, times: tuple[float, float, float | None] | None = None
    ) -> None:
        """Record a response: seconds to the first and last token, and between two."""
        self.requests[(("path", path), ("status", str(status)))] += 1
        self.broken_off += status == GONE
        if times is not None:
            ttft, latency, tpot = times
            self.ttft.add(ttft)
            self.latency.add(latency)
            if tpot is not None:
                self.tpot.add(tpot)

    def lines(self, gauges: Sequence[tuple[str, str, Sequence[tuple[Labels, float]]]]) -> str:
        """Text in Prometheus' format; a gauge is a name, its help, and values by label."""
        name = "fivefold_requests_total"
        rows = [*_head(name, "Requests by path and status.", "counter")]
        rows += [f"{name}{_labels(key)} {count}" for key, count in sorted(self.requests.items())]
        counters = (
            ("fivefold_prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("fivefold_output_tokens_total", "Tokens that were drawn.", self.output_tokens),
            ("fivefold_broken_off_total", "Requests whose client has gone.", self.broken_off),
            ("fivefold_moved_total", "Caches sent to another engine.", self.num_moved),
            ("fivefold_moved_bytes_total", "Bytes of these.", self.moved_bytes),
            ("fivefold_restarts_total", "New starts of engines.", self.restarts),
            ("fivefold_retried_total", "Sequences begun again after a loss.", self.retried),
            ("fivefold_lost_total", "Sequences that failed with an engine.", self.num_lost),
        )
        for name, help, value in counters:
            rows += [*_head(name, help, "counter"), f"{name} {value}"]
        for name, help, values in gauges:
            rows += _head(name, help, "gauge")
            rows += [f"{name}{_labels(labels)} {value}" for labels, value in values]
        for histogram in (self.ttft, self.tpot, self.latency):
            rows += histogram.lines()
        return "\n".join(rows) + "\n"


def _head(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _labels(labels: Labels) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{inner}}}" if inner else ""
