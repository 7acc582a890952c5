"""How fast JSONL becomes tokens, beside the batch encoder of the `tokenizers` library.

    python benchmarks/tokens.py                      1,000 MB, one worker for each core
    python benchmarks/tokens.py --mb 200 --workers 2

It trains a byte-level BPE tokenizer on the source of Python's standard library, writes a JSONL file
of such source, and times in turn, each in a process of its own:

  library   reads the lines, parses them and calls `encode_batch_fast` on a thousand at a time, with
            as many threads as there are workers; it keeps nothing and writes nothing
  fivefold  `fivefold tokens`: the same, and writes shards with checksums

It exits with 1 if fivefold reaches less than 0.9 of the library's speed, or if its memory grows
by more than a tenth from a fifth of the file to all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

LEAST, MOST_GROWTH, ROUNDS, VOCAB = 0.9, 1.1, 3, 8000

LIBRARY = """
import json, sys
from itertools import islice
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
count = 0
with open(sys.argv[1], "rb") as lines:
    while some := [json.loads(line)["text"] for line in islice(lines, 1000)]:
        found = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        count += sum(len(each.ids) for each in found)
print(count)
"""


def make_inputs(folder: Path, num_bytes: int) -> tuple[Path, Path, Path]:
    """A tokenizer, a file of so many bytes, and its first fifth."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [path.read_text("utf-8", "replace") for path in sorted(_sources())]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:150], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = folder / "all.jsonl", folder / "fifth.jsonl"
    pieces = [piece for text in texts for piece in re.findall(r"(?s).{1,4000}", text)]
    for file, most in zip(files, (num_bytes, num_bytes // 5), strict=True):
        size, number = 0, 0
        with file.open("w", encoding="utf-8") as stream:
            while size < most:
                line = json.dumps({"id": number, "text": pieces[number % len(pieces)]}) + "\n"
                size += stream.write(line)
                number += 1
    return folder / "tokenizer.json", *files


def _sources() -> list[Path]:
    return list(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def timed(command: list[str], workers: int) -> tuple[float, str, float]:
    """Seconds, output, and the most MiB that one of its processes had."""
    names = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *command], env=names, capture_output=True, text=True
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr)
    *lines, peak = done.stdout.splitlines()
    return seconds, "\n".join(lines), int(peak) / 1024


def main() -> int:
    """Print the table; 1 where fivefold is too slow, or its memory grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer, file, fifth = make_inputs(folder, said.mb * 10**6)
        library = [sys.executable, "-c", LIBRARY, str(file), str(tokenizer)]
        ours = [sys.executable, "-m", "fivefold", "tokens", "--tokenizer", str(tokenizer)]
        ours += ["--workers", str(said.workers), "--json", "--force", "-o", str(folder / "out")]
        times: dict[str, list[float]] = {"library": [], "fivefold": []}
        peak = 0.0
        for _ in range(said.rounds):
            seconds, count, _ = timed(library, said.workers)
            times["library"].append(seconds)
            seconds, table, peak = timed([*ours, str(file)], said.workers)
            times["fivefold"].append(seconds)
            found = json.loads(table)
            assert found["tokens"] - found["documents"] == int(count), "other tokens"
            for who, each in times.items():
                print(f"{who:9} {each[-1]:7.1f} s  {said.mb / each[-1]:6.1f} MB/s", flush=True)
        _, _, small = timed([*ours, str(fifth)], said.workers)
    ratio = median(times["library"]) / median(times["fivefold"])
    print(f"{said.mb} MB, {said.workers} workers: {ratio:.2f} of the library's speed")
    print(f"peak memory of a process: {small:.0f} MiB for a fifth of the file, {peak:.0f} for all")
    return 0 if ratio >= LEAST and peak <= MOST_GROWTH * small else 1


if __name__ == "__main__":
    sys.exit(main())
