"""Conversations to tokens and a mask: which tokens the assistant says.

A row has `messages`; `instruction`, `input` and `output`; or `prompt` and `completion`. The chat
template of the tokenizer's folder makes its text, and says which characters are the assistant's. A
token has a loss if it begins with one of them. What ends a turn is part of the turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core import BadFile
from fivefold.data.documents import (
    BLANK,
    KEPT,
    Document,
    EncodedBlock,
    LengthFilter,
    TextEncoder,
    encoded,
    lines_of,
)
from fivefold.data.rows import REJECTED
from fivefold.data.shards import DTYPES, MASK, TokenFormat
from fivefold.data.sources import RowBlock, line_row

Render = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Conversations to texts with `spans`, or an `error`: a chat template, in a process of its own."""

_ROLES = {"human": "user", "gpt": "assistant"}  # of `from` and `value`
_LISTS, _TOOLS = ("messages", "conversations"), "tools"
_COLUMN = "name another column by --column, or "
_PAIRS = (("instruction", "output"), ("prompt", "completion"))
_COLUMNS = (
    *_LISTS,
    _TOOLS,
    *("instruction", "input", "output", "prompt", "completion"),
    *("chosen", "rejected"),  # to say what pairs need
)


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes a block of conversations."""

    encoder: TextEncoder
    render: Render
    column: str | None = None  # that has the messages; None: as the row says
    keep: LengthFilter = field(default_factory=LengthFilter)
    digests: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return _COLUMNS if self.column is None else (self.column, _TOOLS)

    @property
    def meaning(self) -> TokenFormat:
        return replace(self.encoder.meaning, masked=True)

    @property
    def files(self) -> dict[str, bytes]:
        return self.encoder.files

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on, besides their format."""
        files = {name: data.decode("utf-8", "replace") for name, data in self.files.items()}
        return {"chat": self.column, "keep": asdict(self.keep), "files": files}

    def __call__(self, block: RowBlock) -> EncodedBlock:
        block_rows = self._rows(block)
        fates = np.array([BLANK if row is None else KEPT for row in block_rows], np.uint8)
        conversations = [
            conversation_of(row, block.where(at), self.column)
            for at, row in enumerate(block_rows)
            if row is not None
        ]
        places = [block.where(int(at)) for at in np.flatnonzero(fates == KEPT)]
        texts = self._texts(conversations, places)
        documents = [
            Document(text.encode(), where) for (text, _), where in zip(texts, places, strict=True)
        ]
        rows = np.flatnonzero(fates == KEPT)
        for row, document in zip(rows, documents, strict=True):
            fates[row] = self.keep.of_text(document.text)
        pairs = [
            self._tokens(text, spans, where)
            for (text, spans), where in zip(texts, places, strict=True)
        ]
        for row, (tokens, _) in zip(rows, pairs, strict=True):
            if fates[row] == KEPT:
                fates[row] = self.keep.of_tokens(len(tokens))
        arrays = [tokens for tokens, _ in pairs]
        done = encoded(block, fates, documents, arrays, rows, self.meaning, self.digests)
        stays = [mask for row, (_, mask) in zip(rows, pairs, strict=True) if fates[row] == KEPT]
        return done._replace(masks=np.concatenate(stays) if stays else np.empty(0, MASK))

    def _rows(self, block: RowBlock) -> list[dict[str, Any] | None]:
        """The row of each line or table; None for a blank line."""
        if isinstance(block.rows, list):
            return block.rows
        if block.unit == "file":
            rule = "it is one text and has no rows; give JSONL, parquet or Arrow files"
            raise BadFile(block.path, [f"{rule}, or a .json file that is an array of objects"])
        lines = enumerate(lines_of(block.rows))
        return [line_row(line, block.where(at)) if line.strip() else None for at, line in lines]

    def _texts(
        self, conversations: list[dict[str, Any]], places: list[str]
    ) -> list[tuple[str, list[Any]]]:
        answers = self.render(conversations) if conversations else []
        texts: list[tuple[str, list[Any]]] = []
        for answer, where in zip(answers, places, strict=True):
            if "error" in answer:
                rule = f"the chat template fails: {answer['error']}"
                raise BadFile(where, [f"{rule}; correct the row or the template"])
            texts.append((answer["text"], answer["spans"]))
        return texts

    def _tokens(
        self, text: str, spans: list[Any], where: str
    ) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """The tokens of a text, and 1 for each that begins in a span."""
        encoding = self.encoder.tokenizer.encode(text, add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        mask = np.zeros(len(begins), MASK)
        for begin, end in spans:
            mask[(begins >= begin) & (begins < end)] = 1
        if not mask.any():
            rule = "no token of it is the assistant's, so that it teaches nothing"
            raise BadFile(where, [f"{rule}; give the assistant's message a text, or take it out"])
        ids, end = encoding.ids, self.encoder.meaning.end
        if end is not None:
            ids, mask = [*ids, end], np.append(mask, np.array([1], MASK))
        return np.array(ids, DTYPES[self.encoder.meaning.dtype]), mask


def conversation_of(row: Any, where: str, column: str | None = None) -> dict[str, Any]:
    """Messages of a row, and its tools if any; refused without an assistant."""
    table = (
        {key: value for key, value in row.items() if value is not None}
        if isinstance(row, dict)
        else {}
    )
    lists = _LISTS if column is None else (column,)
    name = next((column_name for column_name in lists if column_name in table), None)
    if name is not None:
        messages = messages_of(table[name], name, where)
    else:
        pair = next(
            (columns for columns in _PAIRS if column is None and all(k in table for k in columns)),
            None,
        )
        if pair is None:
            known = ", ".join(table) or "none"
            if "chosen" in table and "rejected" in table:
                rule = "it has chosen and rejected, a preference pair"
                raise BadFile(where, [f"{rule}; give --pairs instead of --chat"])
            rule = "it has no messages, no instruction and output, and no prompt and completion"
            remedy = "name the column with the messages by --column"
            raise BadFile(where, [f"{rule}; {remedy}, one of: {known}"])
        messages = _turns(table, *pair, where)
    if not any(message.get("role") == "assistant" for message in messages):
        rule = "the conversation has no message of the assistant, so that it teaches nothing"
        raise BadFile(where, [f"{rule}; add one, or take the row out"])
    tools = table.get(_TOOLS)
    return {"messages": messages, "tools": parsed(tools) if isinstance(tools, str) else tools}


def _turns(
    table: dict[str, Any], question_name: str, answered: str, where: str
) -> list[dict[str, Any]]:
    """Two columns as messages; each may be a list of messages already."""
    question, answer = table[question_name], table[answered]
    if isinstance(question, list) and isinstance(answer, list):
        return [*messages_of(question, question_name, where), *messages_of(answer, answered, where)]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise BadFile(where, [f"{question_name} and {answered} must be texts; correct the row"])
    context = table.get("input") if question_name == "instruction" else None
    question = f"{question}\n\n{context}" if context else question
    turns = (("user", question), ("assistant", answer))
    return [{"role": role, "content": text} for role, text in turns]


def messages_of(
    messages: Any, name: str, where: str, remedy: str = _COLUMN
) -> list[dict[str, Any]]:
    """Messages of a column, which may be JSON text; `way` is another way out."""
    listed = parsed(messages) if isinstance(messages, str) else messages
    if not isinstance(listed, list) or not all(isinstance(message, dict) for message in listed):
        rule = f"{name} is no list of messages with role and content"
        raise BadFile(where, [f"{rule}; {remedy}correct the row"])
    return [_message(message, where) for message in listed]


def _message(raw_message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message with a role and a text; what else it has, such as tool calls, stays."""
    message = {key: value for key, value in raw_message.items() if value is not None}
    if "role" not in message and "from" in message:
        role = str(message.pop("from"))
        message = {"role": _ROLES.get(role, role), "content": message.pop("value", ""), **message}
    if not isinstance(message.get("role"), str):
        raise BadFile(where, ["a message has no role; correct the row"])
    content = message.get("content", "")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(content, str):
        raise BadFile(where, ["the content of a message is no text; correct the row"])
    return {**message, "content": content}


def parsed(text: str) -> Any:
    """Parse a list from JSON text; returns other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# Preference pairs to tokens: an answer that was chosen and one that was rejected, of one prompt.
#
# A row has `chosen` and `rejected`: conversations with one beginning, or answers to a `prompt`. A
# pair is one document: nothing parts it. Its mask has 1 for each token with a loss, and 2 more for
# each token of the rejected text. What both texts begin with has no loss: it would cancel.

CHOSEN_COLUMN, REJECTED_COLUMN, _PROMPT = "chosen", "rejected", "prompt"
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
