"""Start-up time, and the schedule search against the ZB-2p column of the Zero Bubble paper.

Each row prints the bubble of the best schedule found in a memory of 2p microbatches (share of the
longest rank's own span), the published one, and the time the whole command took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

# p, m, F, B, W, transfer (the paper's Table 9) and its bubble rates of ZB-2p (Table 5).
ROWS = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.0039),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.0066),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.0038),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.0018),
)


def timed(*words: str) -> tuple[str, float]:
    """The output of a command and its seconds."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *words], capture_output=True, text=True, check=True
    )
    return done.stdout, time.perf_counter() - start


def main() -> int:
    """Print both tables; 1 if a row misses the published bubble by more than a point."""
    for words in (("--help",), ("schedule", "1f1b", "--stages", "4", "--microbatches", "8")):
        seconds = sorted(timed(*words)[1] for _ in range(5))[2]
        print(f"fivefold {' '.join(words):<45} {seconds:6.2f} s (median of 5; aim below 0.5)")
    print(f"\n{'p':>3} {'m':>4} {'ZB-2p':>8} {'auto':>8} {'seconds':>8}  from")
    missed = 0
    for p, m, forward, backward, weight, transfer, published in ROWS:
        words = f"schedule auto --stages {p} --microbatches {m} --objective span --json".split()
        words += ["--times", f"{forward},{backward},{weight}", "--comm", str(transfer)]
        output, seconds = timed(*words, "--memory-limit", str(2 * p))
        found = json.loads(output)
        missed += found["bubble_span"] > published + 0.01
        print(
            f"{p:>3} {m:>4} {published:>8.4f} {found['bubble_span']:>8.4f} {seconds:>8.2f}"
            f"  {found['origin']}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
