"""Which tokenizer made the tokens: a fingerprint that shards, runs and model folders are held to.

Two files of one tokenizer may differ in spaces, in the order of keys, in how merges are written and
in what they say about truncation and padding: none of it changes a token, nor the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

BYTES = "bytes"  # in place of a tokenizer: one token a byte
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""Usual names of the token that ends a document."""
_SHOWN = 12  # digits
NUM_BYTES = 256  # tokens 0 to 255; token 256 ends a document if the vocabulary has it
_END = "<|end|>"


@dataclass(frozen=True)
class TokenizerId:
    """A tokenizer by name and fingerprint."""

    name: str
    fingerprint: str

    def __str__(self) -> str:
        if self.fingerprint == BYTES:
            return "bytes, one token each"
        return f"{self.name}, fingerprint {self.fingerprint[:_SHOWN]}"


def byte_tokenizer(vocab: int) -> dict[str, bytes]:
    """The files of a tokenizer with one token a byte, which `transformers` loads; a larger
    vocabulary has the token after them, which ends a text."""
    # The letters that GPT-2 writes for bytes: those that no text shows come after them.
    shown = {*range(33, 127), *range(161, 173), *range(174, NUM_BYTES)}
    hidden = (byte for byte in range(NUM_BYTES) if byte not in shown)
    codes = {byte: byte for byte in shown} | {byte: 256 + i for i, byte in enumerate(hidden)}
    off = dict.fromkeys(("add_prefix_space", "use_regex", "trim_offsets"), False)
    level = {"type": "ByteLevel", **off}
    end = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end |= {"id": NUM_BYTES, "content": _END, "special": True}
    ends = vocab > NUM_BYTES
    table: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [end] if ends else [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {chr(codes[b]): b for b in sorted(codes)}, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"eos_token": _END} if ends else {}
    texts = {TOKENIZER: table, "tokenizer_config.json": config}
    return {name: json.dumps(table_value, indent=1).encode() for name, table_value in texts.items()}


def fingerprint(data: bytes) -> str:
    """The fingerprint of the text of a `tokenizer.json`; that of bytes is the same with a file."""
    if data in (byte_tokenizer(NUM_BYTES)[TOKENIZER], byte_tokenizer(NUM_BYTES + 1)[TOKENIZER]):
        return BYTES
    try:
        table: Any = json.loads(data)
    except (ValueError, RecursionError):
        return hashlib.sha256(data).hexdigest()
    if isinstance(table, dict):
        settings = cast("dict[str, Any]", table)
        table = {
            key: value for key, value in settings.items() if key not in ("truncation", "padding")
        }
        model = table.get("model")
        if isinstance(model, dict):
            table["model"] = _with_pairs(cast("dict[str, Any]", model))
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _with_pairs(model: dict[str, Any]) -> dict[str, Any]:
    """A model whose merges are pairs: older files write both in one text."""
    merges = model.get("merges")
    if not isinstance(merges, list):
        return model
    listed = cast("list[Any]", merges)
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in listed]
    return {**model, "merges": pairs}


def tokenizer_in(folder: Path) -> TokenizerId | None:
    """The tokenizer of a folder; None if it has none."""
    path = folder / TOKENIZER
    return TokenizerId(path.name, fingerprint(path.read_bytes())) if path.is_file() else None


def model_folder(model: str) -> Path | None:
    """The folder of a model that is a Hugging Face config; None for a preset or a config's text."""
    if model.lstrip().startswith("{"):  # too long for a path
        return None
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        return path.parent
    return path if "/" in model and (path / "config.json").is_file() else None


def files_in(folders: Iterable[Path | None], names: Iterable[str]) -> dict[str, bytes]:
    """The files with these names, each from the first folder that has it."""
    present = [folder for folder in folders if folder is not None]
    paths_by_name = {
        name: [folder_path / name for folder_path in present if (folder_path / name).is_file()]
        for name in names
    }
    return {name: paths[0].read_bytes() for name, paths in paths_by_name.items() if paths}
