"""The peer of `benchmarks/gpu.py`: TorchTitan 0.2.2 in a folder of its own, and its runner.

    python benchmarks/peer.py build/peer

downloads the wheels of TorchTitan, torchao and what they import, unpacks what is Python of them
(about 10 MB, for any machine), and adds `benchmarks/torchtitan_runner.py`. Nothing is installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = (
    "torchtitan==0.2.2",
    "torchao==0.18.0",
    "tyro==1.0.16",
    "docstring_parser==0.18.0",
    "typeguard==4.6.0",
    "typing_extensions==4.16.0",
)
RUNNER = Path(__file__).parent / "torchtitan_runner.py"
BINARY = (".so", ".pyd", ".dylib")


def unpack(wheel: Path, folder: Path) -> None:
    """The Python of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if not (name.endswith(BINARY) or "/csrc/" in name or "/tests/" in name):
                packed.extract(name, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if folder.exists() and any(folder.iterdir()):
        print(f"{folder} is not empty: give a new folder", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", place, *WHEELS]
        done = subprocess.run([sys.executable, "-m", "pip", *words])
        if done.returncode:
            print("the wheels could not be downloaded: see above", file=sys.stderr)
            return 1
        for wheel in sorted(Path(place).glob("*.whl")):
            unpack(wheel, folder)
    shutil.copyfile(RUNNER, folder / "peer_torchtitan.py")
    print(f"{folder}: compare with python benchmarks/gpu.py compare --peer {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
