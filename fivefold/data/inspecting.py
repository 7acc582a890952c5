"""What a folder of tokens has: lengths of documents, and the beginning of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fivefold.core.model import BYTES, NUM_BYTES, TOKENIZER
from fivefold.data.documents import read_tokenizer
from fivefold.data.shards import open_corpus, read_index

_SAMPLE = 64  # tokens


def inspect(folder: Path) -> dict[str, Any]:
    """Lengths of documents and a decoded sample; of conversations, the share with a loss."""
    index = read_index(folder)
    corpus = open_corpus(folder, index.vocab)
    ends = [np.append(shard.begins[1:], len(shard.tokens)) for shard in corpus.shards]
    pairs = zip(ends, corpus.shards, strict=True)
    lengths = np.concatenate([stop - shard.begins for stop, shard in pairs])
    first = corpus.shards[0].tokens[: min(_SAMPLE, int(lengths[0]))].tolist()
    masks = [shard.mask for shard in corpus.shards if shard.mask is not None]
    counted = sum(int(np.count_nonzero(mask & 1)) for mask in masks)
    return {
        "lengths": {
            "min": int(lengths.min()),
            "median": int(np.median(lengths)),
            "max": int(lengths.max()),
        },
        "with_loss": counted / index.num_tokens if masks else 1.0,
        "sample_tokens": first,
        "sample": _decoded(folder, index.meaning.tokenizer, first),
    }


def _decoded(folder: Path, tokenizer: str, tokens: list[int]) -> str | None:
    """The text of tokens; None if the folder has no tokenizer."""
    if tokenizer == BYTES:
        return bytes(token for token in tokens if token < NUM_BYTES).decode("utf-8", "replace")
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    return read_tokenizer(path.read_bytes(), path).decode(tokens, skip_special_tokens=False)
