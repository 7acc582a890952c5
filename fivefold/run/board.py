"""Where ranks leave word for one another beside their collectives: a folder, or torch's store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch.distributed as dist


class Board(Protocol):
    """Short texts by name, seen by all ranks."""

    def put(self, name: str, text: str) -> None: ...
    def get(self, name: str) -> str | None: ...

    def claim(self, name: str, text: str) -> bool:
        """Put it if nobody has; whether this rank was the first."""
        ...


class FolderBoard:
    """For ranks of one machine: a file for each name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, text: str) -> None:
        written = self.folder / f"{name}.{os.getpid()}"
        written.write_text(text, "utf-8")
        written.replace(self.folder / name)  # a reader sees all of it or nothing

    def get(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text("utf-8")
        except FileNotFoundError:
            return None

    def claim(self, name: str, text: str) -> bool:
        try:
            with (self.folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True


class StoreBoard:
    """For ranks of many machines."""

    def __init__(self, store: dist.Store) -> None:
        self.store = dist.PrefixStore("board", store)

    def put(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def get(self, name: str) -> str | None:
        return self.store.get(name).decode() if self.store.check([name]) else None

    def claim(self, name: str, text: str) -> bool:
        return self.store.compare_set(name, "", text).decode() == text
