"""What a body asks for, checked, and errors in the shape of the API.

Every key is known or refused: a typo never changes an answer in silence. Keys of the API that ask
for nothing here (`user`, `store`) are taken; those that ask for what an engine cannot do are
refused, unless they have the value that means nothing (`presence_penalty: 0`, `tools: []`), which
clients of other servers send.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fivefold.core import did_you_mean

Headers = list[tuple[str, str]]
MOST_ALTERNATIVES, MOST_CHOICES, MOST_STOPS, MOST_STOP_TEXT = 20, 128, 16, 256
MOST_STOP_TOKENS = 128  # which a step may have to mask in every row
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOTHING: dict[str, tuple[Any, ...]] = {  # keys whose other values, but null, ask for something
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "echo": (False,),  # of a chat
    "priority": (0,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("bad_words", "logits_processors", "documents", "tools", "functions"), ([],)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("structured_outputs", "truncate_prompt_tokens", "allowed_token_ids"), ()),
    **dict.fromkeys(("chat_template", "audio", "prediction", "web_search_options"), ()),
}
_ANY_OBJECT = '{"type": "object"}'
_LONGEST_KEY = 64  # characters that are compared with known keys
_TAKEN = (
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "verbosity", "reasoning_effort", "request_id", "cache_salt"),
)


class ApiError(Exception):
    """An error in the format of the API."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: Headers = headers or []
        super().__init__(message)

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """The error as JSON."""
        table = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": table}).encode()


def wrong(param: str, rule: str) -> ApiError:
    """Error of an invalid value."""
    return ApiError(400, f"{param}: {rule}", param, "invalid_value")


@dataclass(frozen=True)
class AskedText:
    """A request for completions, of prompts or of a chat."""

    model: str
    chat: bool
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[dict[str, str], ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int | None
    seed: int | None
    n: int
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool  # after a stream
    logprobs: bool
    alternatives: int
    parse_special: bool  # special tokens in the texts of prompts or messages are tokens
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None  # likeliest tokens for every token of a prompt
    echo: bool = False  # prompts are part of the texts
    grammar: str = ""  # JSON schema of the texts; "": any text

    @property
    def shows_prompt(self) -> bool:
        """Whether an answer has something of its prompt."""
        return self.echo or self.prompt_logprobs is not None

    @property
    def prompt_alternatives(self) -> int | None:
        """Number of likeliest tokens to compute for every token of a prompt; None: no scores."""
        if not (self.echo and self.logprobs):
            return self.prompt_logprobs
        return max(self.prompt_logprobs or 0, self.alternatives)


def parse_asked(body: bytes, chat: bool) -> AskedText:
    """Parse the body of a request."""
    fields = _Fields(_table(body))
    logprobs, alternatives = _logprobs(fields, chat)
    echo = not chat and (fields.take("echo", _flag) or False)
    limit = fields.take("max_tokens", _whole(0 if echo else 1, 1 << 31))  # 0: the prompt alone
    if chat:
        limit = fields.take("max_completion_tokens", _whole(1, 1 << 31)) or limit
    n = fields.take("n", _whole(1, MOST_CHOICES)) or 1
    best = fields.take("best_of", _whole(1, MOST_CHOICES))
    if best not in (None, n):
        raise wrong("best_of", f"{best} is not n = {n}, and all choices are returned: leave it out")
    stream = fields.take("stream", _flag) or False
    request = AskedText(
        fields.take("model", _text) or "",
        chat,
        () if chat else _prompts(fields.take("prompt", lambda value: value)),
        _messages(fields.take("messages", lambda value: value)) if chat else (),
        limit if limit is not None or chat else 16,
        _or(fields.take("temperature", _number(0, 2)), 1.0),
        _or(fields.take("top_p", _number(0, 1, above=True)), 1.0),
        _top_k(fields.take("top_k", _whole(-1, 1 << 31))),
        fields.take("seed", _whole(-(1 << 63), (1 << 63) - 1)),
        n,
        _stops(fields.take("stop", lambda value: value)),
        stream,
        _with_usage(fields.take("stream_options", lambda value: value), stream),
        logprobs,
        alternatives,
        _or(fields.take("parse_special", _flag), not chat),
        min_p=_or(fields.take("min_p", _number(0, 1)), 0.0),
        min_tokens=fields.take("min_tokens", _whole(0, 1 << 31)) or 0,
        ignore_eos=fields.take("ignore_eos", _flag) or False,
        stop_token_ids=fields.take("stop_token_ids", _stop_tokens) or (),
        prompt_logprobs=fields.take("prompt_logprobs", _whole(0, MOST_ALTERNATIVES)),
        echo=echo,
        grammar=fields.take("response_format", _grammar) or "",
    )
    if request.n * max(1, len(request.prompts)) > MOST_CHOICES:
        raise wrong("n", f"prompts times n are more than {MOST_CHOICES} choices: send fewer")
    fields.end()
    return request


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value


def _table(body: bytes) -> dict[str, Any]:
    try:
        table: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(table, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return cast("dict[str, Any]", table)


class _Fields:
    """Reader of the keys of a body."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.left, self.known = dict(table), [*_NOTHING, *_TAKEN]

    def take(self, name: str, check: Callable[[Any], Any]) -> Any:
        """The value, checked; None where there is none."""
        self.known.append(name)
        value = self.left.pop(name, None)
        if value is None:
            return None
        try:
            return check(value)
        except ValueError as error:
            raise wrong(name, str(error)) from error

    def end(self) -> None:
        """Refuse what is left, unless it asks for nothing."""
        for name, value in self.left.items():
            if name in _NOTHING and not _is_any(value, (None, *_NOTHING[name])):
                rule = f"{name} = {_short(value)} is not supported: leave it out"
                usual = "".join(f", or give {_short(v)}" for v in _NOTHING[name][:1])
                raise ApiError(400, f"{rule}{usual}", name, "unsupported_value")
            if name not in self.known:
                near = did_you_mean(name[:_LONGEST_KEY], self.known)
                rule = f"unknown key {_short(name)}: {near}"
                raise ApiError(400, rule, name[:100], "unknown_parameter")


def _is_any(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is one of these; in JSON, true is not 1."""
    flag = isinstance(value, bool)
    return any(value == other and flag == isinstance(other, bool) for other in values)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{_short(value)} is no whole number from {low} to {high}")
        return value

    return check


def _number(low: float, high: float, above: bool = False) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # false for NaN; whole numbers may be huge
            raise ValueError(f"{_short(value)} is no number from {low} to {high}")
        if above and value == low:
            raise ValueError(f"{_short(value)} is not above {low}")
        return float(value)

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{_short(value)} is neither true nor false")
    return value


def _text(value: Any) -> str:
    """A text that can be encoded: half of a surrogate pair cannot."""
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("not valid Unicode: half of a surrogate pair is alone") from error
    return value


def _top_k(value: int | None) -> int | None:
    """None, as 0 and −1, for all tokens."""
    return value if value is not None and value > 0 else None


def _grammar(value: Any) -> str:
    """The JSON schema that an answer has to follow."""
    table = _object(value, "response_format", ("type", "json_schema"))
    kind = table.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(f"type {_short(kind)} is none of text, json_object, json_schema")
    if kind != "json_schema":
        if table.get("json_schema") is not None:
            raise ValueError(f"json_schema beside type {kind}: give type json_schema")
        return "" if kind == "text" else _ANY_OBJECT
    keys = ("name", "description", "schema", "strict")
    named = _object(table.get("json_schema"), "json_schema", keys)
    for name, check in (("name", _text), ("description", _text), ("strict", _flag)):
        if named.get(name) is not None:
            check(named[name])
    if not isinstance(named.get("schema"), dict):
        raise ValueError("json_schema.schema is not an object: give a JSON schema")
    return json.dumps(named["schema"])


def _object(value: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object with no other keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} = {_short(value)} is not an object")
    table = cast("dict[str, Any]", value)
    if unknown_keys := sorted(table.keys() - set(keys)):
        known = ", ".join(keys)
        raise ValueError(f"unknown key {_short(unknown_keys[0])} of {name}: known are {known}")
    return table


def _stop_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{_short(value)} is not a list of tokens")
    tokens = _tokens(cast("list[Any]", value))
    if len(tokens) > MOST_STOP_TOKENS:
        raise ValueError(f"{len(tokens)} tokens are more than {MOST_STOP_TOKENS}")
    return tokens


def _logprobs(fields: _Fields, chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and of how many tokens beside the drawn one."""
    if not chat:
        count = fields.take("logprobs", _whole(0, MOST_ALTERNATIVES))
        return count is not None, count or 0
    flag = fields.take("logprobs", _flag) or False
    count = fields.take("top_logprobs", _whole(0, MOST_ALTERNATIVES))
    if count is not None and not flag:
        raise wrong("top_logprobs", "needs logprobs: true")
    return flag, count or 0


def _with_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise wrong("stream_options", "needs stream: true")
    if not isinstance(options, dict):
        raise wrong("stream_options", "is not an object")
    table = cast("dict[str, Any]", options)
    if unknown_keys := sorted(table.keys() - {"include_usage", "include_obfuscation"}):
        raise wrong("stream_options", f"unknown key {_short(unknown_keys[0])}")
    return table.get("include_usage") is True


def _stops(value: Any) -> tuple[str, ...]:
    texts = cast("list[Any]", value) if isinstance(value, list) else [value]
    if value is None:
        return ()
    if len(texts) > MOST_STOPS:
        raise wrong("stop", f"{len(texts)} texts are more than {MOST_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MOST_STOP_TEXT:
            raise wrong("stop", f"give texts of 1 to {MOST_STOP_TEXT} characters")
    return tuple(texts)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each a text or a list of tokens."""
    if value is None:
        raise ApiError(400, "prompt: it is missing", "prompt", "missing_required_parameter")
    try:
        if isinstance(value, list) and value:
            several = cast("list[Any]", value)
            if isinstance(several[0], int):
                return (_tokens(several),)
            return tuple(
                _tokens(cast("list[Any]", prompt)) if isinstance(prompt, list) else _text(prompt)
                for prompt in several
            )
        return (_text(value),)
    except ValueError as error:
        raise wrong("prompt", str(error)) from error


def _tokens(value: list[Any]) -> tuple[int, ...]:
    if any(isinstance(token, bool) or not isinstance(token, int) for token in value):
        raise ValueError("a list of tokens has something else in it")
    return tuple(value)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ApiError(
            400, "messages: give a list of messages", "messages", "missing_required_parameter"
        )
    return tuple(_message(message, i) for i, message in enumerate(cast("list[Any]", value)))


def _message(value: Any, index: int) -> dict[str, str]:
    param = f"messages[{index}]"
    if not isinstance(value, dict):
        raise wrong(param, "is not an object")
    table = {k: v for k, v in cast("dict[str, Any]", value).items() if v is not None}
    if table.get("role") not in _ROLES:
        raise wrong(param, f"role {_short(table.get('role'))} is none of {', '.join(_ROLES)}")
    if unknown_keys := sorted(table.keys() - {"role", "content", "name", "tool_call_id"}):
        raise wrong(param, f"{_short(unknown_keys[0])} is not supported")
    try:
        named = {key: _text(table[key]) for key in table if key != "content"}
        return {**named, "content": _content(table.get("content"))}
    except ValueError as error:
        raise wrong(param, str(error)) from error


def _content(value: Any) -> str:
    """A text, or the texts of its parts."""
    if isinstance(value, list):
        parts: list[str] = []
        for entry in cast("list[Any]", value):
            part = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
            if part.get("type") != "text":
                raise ValueError(f"a part of type {_short(part.get('type'))}: only text is read")
            parts.append(_text(part.get("text")))
        return "".join(parts)
    return _text(value)
