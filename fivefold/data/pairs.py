"""Preference pairs to tokens: an answer that was chosen and one that was rejected, of one prompt.

A row has `chosen` and `rejected`: conversations with one beginning, or answers to a `prompt`. A
pair is one document: nothing parts it. Its mask has 1 for each token with a loss, and 2 more for
each token of the rejected text. What both texts begin with has no loss: it would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core import BadFile
from fivefold.data.conversations import ChatEncoder, messages_of, parsed
from fivefold.data.documents import BLANK, KEPT, Document, EncodedBlock, encoded
from fivefold.data.rows import REJECTED
from fivefold.data.shards import MASK, TokenFormat
from fivefold.data.sources import RowBlock

CHOSEN_COLUMN, REJECTED_COLUMN, _PROMPT, _TOOLS = "chosen", "rejected", "prompt", "tools"
Rendered = tuple[str, list[Any]]
"""A text, and the spans of its characters that the assistant says."""


@dataclass(frozen=True)
class PairEncoder(ChatEncoder):
    """Encodes a block of preference pairs."""

    @property
    def columns(self) -> tuple[str, ...]:
        return CHOSEN_COLUMN, REJECTED_COLUMN, _PROMPT, _TOOLS

    @property
    def meaning(self) -> TokenFormat:
        return replace(self.encoder.meaning, masked=True, paired=True)

    def __call__(self, block: RowBlock) -> EncodedBlock:
        block_rows = self._rows(block)
        fates = np.array([BLANK if row is None else KEPT for row in block_rows], np.uint8)
        rows = np.flatnonzero(fates == KEPT)
        places = [block.where(int(at)) for at in rows]
        row_pairs = [pair_of(block_rows[at], where) for at, where in zip(rows, places, strict=True)]
        flat = [conversation for pair in row_pairs for conversation in pair]
        texts = self._texts(flat, [where for where in places for _ in range(2)])
        documents: list[Document] = []
        arrays: list[tuple[NDArray[Any], NDArray[np.uint8]]] = []
        for number, (row, where) in enumerate(zip(rows, places, strict=True)):
            sides = parted(texts[2 * number], texts[2 * number + 1], where)
            encodings = [self._tokens(*side, where) for side in sides]
            fates[row] = self._fate(
                [text for text, _ in sides], [len(side_tokens) for side_tokens, _ in encodings]
            )
            documents.append(Document("\n".join(text for text, _ in sides).encode(), where))
            tokens, masks = zip(*encodings, strict=True)
            arrays.append(
                (np.concatenate(tokens), np.concatenate([masks[0], masks[1] | MASK.type(REJECTED)]))
            )
        joined = [tokens for tokens, _ in arrays]
        done = encoded(block, fates, documents, joined, rows, self.meaning, self.digests)
        stays = [mask for row, (_, mask) in zip(rows, arrays, strict=True) if fates[row] == KEPT]
        return done._replace(masks=np.concatenate(stays) if stays else np.empty(0, MASK))

    def _fate(self, texts: list[str], lengths: list[int]) -> int:
        """A pair stays if both of its texts do."""
        fates = [self.keep.of_text(text.encode()) for text in texts]
        fates += [self.keep.of_tokens(length) for length in lengths]
        return next((fate for fate in fates if fate != KEPT), KEPT)


def parted(chosen: Rendered, rejected: Rendered, where: str) -> tuple[Rendered, Rendered]:
    """Split off the spans that both texts share at the beginning."""
    (first, spans), (second, other_spans) = chosen, rejected
    if first == second:
        rule = "chosen and rejected have the same text, so that the pair teaches nothing"
        raise BadFile(where, [f"{rule}; correct the row, or take it out"])

    def shared(end: int) -> bool:
        return first[:end] == second[:end]

    return (
        (first, [span for span in spans if not shared(span[1])]),
        (second, [span for span in other_spans if not shared(span[1])]),
    )


def pair_of(row: Any, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Conversations of a row, chosen and rejected; refused if their prompts differ."""
    table = (
        {key: value for key, value in row.items() if value is not None}
        if isinstance(row, dict)
        else {}
    )
    missing = [column for column in (CHOSEN_COLUMN, REJECTED_COLUMN) if column not in table]
    if missing:
        rule = f"the pair has no {' and no '.join(missing)}"
        known = ", ".join(table) or "none"
        remedy = "complete the row, or give --chat for conversations"
        raise BadFile(where, [f"{rule}, only: {known}; {remedy}"])
    chosen, rejected = (_side(table, column, where) for column in (CHOSEN_COLUMN, REJECTED_COLUMN))
    _require_one_prompt(chosen, rejected, where)
    tools = table.get(_TOOLS)
    tools = parsed(tools) if isinstance(tools, str) else tools
    return {"messages": chosen, "tools": tools}, {"messages": rejected, "tools": tools}


def _side(table: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """One conversation: with its prompt, if the column has only the answer."""
    content, prompt = table[name], table.get(_PROMPT)
    if isinstance(content, str) and isinstance(parsed(content), list):
        content = parsed(content)
    if isinstance(content, str):
        answer = [{"role": "assistant", "content": content}]
    else:
        answer = messages_of(content, name, where, "")
        if answer and answer[0]["role"] != "assistant":
            return answer
    if prompt is None:
        rule = f"{name} has an answer and no prompt; give a column prompt"
        raise BadFile(where, [f"{rule}, or all messages in {name}"])
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}, *answer]
    return [*messages_of(prompt, _PROMPT, where, ""), *answer]


def _require_one_prompt(
    chosen: list[dict[str, Any]], rejected: list[dict[str, Any]], where: str
) -> None:
    """The first message that differs is the assistant's on both sides."""
    message_pairs = list(zip(chosen, rejected, strict=False))
    for number, (message, other) in enumerate(message_pairs):
        if message != other:
            roles = {message["role"], other["role"]}
            if roles == {"assistant"}:
                return
            rule = f"message {number + 1} of chosen and rejected differs and is not the assistant's"
            raise BadFile(where, [f"{rule}; give both answers to one prompt"])
    if len(chosen) != len(rejected):
        rule = "chosen and rejected are the same conversation, and one of them goes on"
        raise BadFile(where, [f"{rule}; let both end with an answer to one prompt"])
    rule = "chosen and rejected are the same, so that the pair teaches nothing"
    raise BadFile(where, [f"{rule}; correct the row, or take it out"])
