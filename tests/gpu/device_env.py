"""What `make accept-gpu` needs on a GPU machine where nothing can be installed.

    python -m tests.gpu.device_env

fills the ignored folder `carry`, which travels with a copy of the checkout:

- `env`: what the journeys import and that machine lacks, unpacked from wheels for Python 3.12 on
  x86_64, and `env.tar.xz`, the same in a fifth of the bytes (`tests.gpu.accept` unpacks it where
  `env` is missing).
- `nccl.xz`: an NCCL that lets several ranks share one GPU, with the code of Hopper GPUs alone.
  torch before 2.14 has an older one; `tests.gpu.accept` loads this one before it.
- `tree`: what `git rev-parse HEAD:fivefold` gives, so that a copy without `.git` knows whether it
  is the commit.
"""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.gpu.accept import CARRY, ENV, NCCL, PACKED, ROOT, TREE, Refused, tree_of_commit

MOST_BYTES = 40_000_000
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_18_x86_64",
    "manylinux_2_26_x86_64",
    "manylinux2014_x86_64",
)
# A package that has no part below is taken whole.
OPENAI = ("openai>=1.40,<3", "pydantic>=2,<3", "jiter<1", "distro<2", "sniffio<2")
PYDANTIC = ("annotated-types<1", "typing-inspection<1")
LM_EVAL = ("lm-eval>=0.4.5,<1", "datasets<6", "evaluate<1", "dill<1", "multiprocess<1", "xxhash<5")
SACREBLEU = ("sacrebleu<3", "portalocker<4", "tabulate<1", "colorama<1", "lxml<7")
PAGE = ("plotly>=6,<8", "starlette>=0.40,<2", "uvicorn>=0.30,<1")
WHEELS = (*OPENAI, *PYDANTIC, *LM_EVAL, *SACREBLEU, *PAGE)
PARTS = {
    "plotly": ("plotly/__init__.py", "plotly/package_data/plotly.min.js"),
    "lxml": ("lxml/__init__.py", "lxml/etree", "lxml/_elementpath"),
}
LEFT_OUT = (".pyi", ".pyx", ".pxd", ".pxi", ".h")
NCCL_WHEEL = "nvidia-nccl-cu13==2.30.7"
FAT_BINARY, ELF, PTX, HOPPER = 0xBA55ED50, 2, 1, 90


def download(folder: Path, *names: str, python: str = "3.12") -> list[Path]:
    """Fetch the wheels of these packages, and of nothing that they ask for."""
    words = ["--only-binary=:all:", "--no-deps", "--python-version", python, "-d", str(folder)]
    words += [word for each in PLATFORMS for word in ("--platform", each)]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *words, *names], check=True)
    return sorted(folder.glob("*.whl"))


def is_needed(package: str, name: str) -> bool:
    """Whether a file of a wheel is imported by a journey."""
    if name.endswith(LEFT_OUT) or (name.startswith("lm_eval/tasks/") and name.count("/") > 2):
        return False  # tasks of a journey are its own
    return package not in PARTS or name.startswith(PARTS[package])


def unpack(folder: Path) -> int:
    """Write `env` anew; its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        wheels = download(Path(name), *WHEELS)
        # Each release of pydantic wants one release of its compiled core.
        wheels += download(Path(name) / "core", core_of(wheels))
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                package = wheel.name.partition("-")[0]
                archive.extractall(
                    folder, [each for each in archive.namelist() if is_needed(package, each)]
                )
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def core_of(wheels: list[Path]) -> str:
    """The requirement of pydantic for its core."""
    (wheel,) = [each for each in wheels if each.name.startswith("pydantic-")]
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [each for each in archive.namelist() if each.endswith("/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    (line,) = [each for each in lines if each.startswith("Requires-Dist: pydantic-core")]
    return line.partition(": ")[2]


def nccl_of_hopper() -> bytes:
    """NCCL's library with the code of all other GPUs blanked, so that it packs small."""
    with tempfile.TemporaryDirectory() as name:
        (wheel,) = download(Path(name), NCCL_WHEEL)
        blob = bytearray(zipfile.ZipFile(wheel).read("nvidia/nccl/lib/libnccl.so.2"))
    start = 0
    while (start := blob.find(struct.pack("<I", FAT_BINARY), start)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", blob, start + 4)
        if version != 1 or header != 16 or start + 16 + size > len(blob):
            start += 4
            continue
        image, end = start + 16, start + 16 + size
        while image < end:
            kind, _, head, body = struct.unpack_from("<HHIQ", blob, image)
            if kind not in (ELF, PTX) or head > 4096:
                break
            (built_for,) = struct.unpack_from("<I", blob, image + 28)
            if (kind, built_for) != (ELF, HOPPER):
                blob[image + head : image + head + body] = bytes(body)
            image += head + body
        start = end
    return lzma.compress(blob)


def main() -> int:
    """Fill the folder; what is there and still fits stays, but for the commit's tree."""
    try:
        tree = tree_of_commit(ROOT)
    except Refused as error:
        print(f"device-env: {error}", file=sys.stderr)
        return 2
    CARRY.mkdir(exist_ok=True)
    TREE.write_text(f"{tree}\n", "utf-8")
    wheels, noted = " ".join(WHEELS), CARRY / "wheels"
    if not PACKED.exists() or not noted.exists() or noted.read_text("utf-8") != wheels:
        size = unpack(ENV)
        if size > MOST_BYTES:
            shutil.rmtree(ENV)
            print(f"device-env: {size:,} bytes are more than {MOST_BYTES:,}", file=sys.stderr)
            return 2
        with tarfile.open(PACKED, "w:xz") as archive:
            archive.add(ENV, arcname=ENV.name)
        noted.write_text(wheels, "utf-8")
    if not NCCL.exists():
        NCCL.write_bytes(nccl_of_hopper())
    for path in (PACKED, NCCL):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    print(f"fivefold/ is {tree}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
