"""`response_format`: what is taken, what is refused and with which way out, without a model."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("h11", reason="pip install 'fivefold[serve]', which make setup does")

from test_serve_door import Desk, run, status
from test_serve_keys import answer_of, asked, parsed

from fivefold.core.errors import FivefoldError
from fivefold.generate.grammar import GRAMMAR_FAILED, MOST_SCHEMA_BYTES, Grammars
from fivefold.generate.requests import NO_TOKEN, Request
from fivefold.generate.text import ByteCodec
from fivefold.serve.schema import ApiError

needs_library = pytest.mark.skipif(
    find_spec("llguidance") is None,
    reason="pip install 'fivefold[grammar]', which make setup does",
)
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"enum": ["é"]}}}
FORMATS = (
    ({"type": "text"}, ""),
    ({"type": "text", "json_schema": None}, ""),
    (None, ""),
    ({"type": "json_object"}, '{"type": "object"}'),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, json.dumps(SCHEMA)),
    (
        {
            "type": "json_schema",
            "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA},
        },
        json.dumps(SCHEMA),
    ),
    ({"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}, "{}"),
)


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize(("body", "grammar"), FORMATS, ids=str)
def test_formats_are_read(body: Any, grammar: str, chat: bool) -> None:
    assert parsed(chat, response_format=body).grammar == grammar
    assert parsed(chat).grammar == ""


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("json", 'response_format = "json" is not an object'),
        ({}, "type null is none of text, json_object, json_schema"),
        ({"type": "json"}, 'type "json" is none of text, json_object, json_schema'),
        ({"type": "json_object", "schema": {}}, 'unknown key "schema" of response_format'),
        ({"type": "json_object", "json_schema": {}}, "give type json_schema"),
        ({"type": "json_schema"}, "json_schema = null is not an object"),
        (of_schema(None), "json_schema.schema is not an object: give a JSON schema"),
        (of_schema(True), "json_schema.schema is not an object"),
        (of_schema({}) | {"strict": True}, 'unknown key "strict" of response_format'),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strct": 1}}, "known are name"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "1 is neither"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 3}}, "3 is not a text"),
    ],
    ids=str,
)
def test_a_bad_format_is_refused_with_its_rule(body: Any, rule: str, chat: bool) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(chat, response_format=body)
    error = caught.value
    assert (error.status, error.param) == (400, "response_format") and rule in error.message


@needs_library
def test_a_schema_reaches_the_engine(tmp_path: Path) -> None:
    answer, requests = asked(tmp_path, response_format=of_schema(SCHEMA), max_tokens=2, n=1)
    assert status(answer) == 200 and [r.grammar for r in requests] == [json.dumps(SCHEMA)]
    _, (plain,) = asked(tmp_path, response_format={"type": "text"}, max_tokens=2)
    assert plain.grammar == ""


@needs_library
@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        ({"type": "nothing"}, "Invalid type: nothing: give a schema that"),
        ({"oneOf": [{}, {}]}, "write anyOf, or leave oneOf out"),
        ({"type": "array", "uniqueItems": True}, '["uniqueItems"]: leave them out, and check'),
        ({"x-guidance": {"lenient": True}, "not": {}}, '["not"]: leave them out'),
        ({"$ref": "https://example.com/x"}, "put what $ref names into $defs"),
        ({"type": "string", "pattern": "a(?=b)"}, "write the pattern without look-around"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum (3) is greater than maximum"),
        ({"type": "string", "minLength": "a"}, "response_format: no grammar: "),
        ({"const": float("nan")}, "response_format: no grammar: "),
        ({"const": "\ud800"}, "response_format: no grammar: "),
        ({"enum": ["a" * MOST_SCHEMA_BYTES]}, "bytes is more than 32,768: shorten it"),
    ],
    ids=lambda value: str(value)[:40].encode("unicode_escape").decode(),
)
def test_a_schema_that_cannot_be_compiled_is_refused(
    tmp_path: Path, schema: Any, rule: str
) -> None:
    answer, requests = asked(tmp_path, response_format=of_schema(schema))
    error = answer_of(answer)["error"]
    assert status(answer) == 400 and not requests, "nothing has begun"
    assert error["param"] == "response_format" and rule in error["message"], error
    assert len(error["message"]) < 500


@needs_library
def test_a_schema_of_great_depth_is_refused(tmp_path: Path) -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    answer, requests = asked(tmp_path, response_format=of_schema(schema))
    assert status(answer) == 400 and not requests and b"recursion limit" in answer


def test_without_the_library_a_schema_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer, requests = asked(tmp_path, response_format=of_schema(SCHEMA))
    error = answer_of(answer)["error"]
    assert status(answer) == 400 and not requests and error["param"] == "response_format"
    rule = "install fivefold[grammar]: pip install 'fivefold[grammar]'"
    assert rule in error["message"]
    plain, _ = asked(tmp_path, response_format={"type": "text"}, max_tokens=2)
    assert status(plain) == 200
    grammars = Grammars(ByteCodec(), 256)
    grammars.load()  # as servers and ranks do when they start
    with pytest.raises(FivefoldError, match=r"install fivefold\[grammar\]"):
        grammars.check("{}")
    assert grammars.next_tokens(Request("a", (1,), 1, grammar="{}"), ()) == (None, "error")


@needs_library
def test_a_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    grammars, compiled = Grammars(ByteCodec(), 256), list[str]()
    plain = llguidance.LLParserLimits

    def limits(**keys: Any) -> Any:
        compiled.append(schema)
        return plain(**keys)

    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    for schema in ("{}", '{"type":"null"}', "{}"):
        grammars.check(schema)
    assert compiled == ["{}", '{"type":"null"}']


@needs_library
@pytest.mark.parametrize("token", [NO_TOKEN, 100], ids=["of a grammar", "of logits"])
def test_a_failure_says_whose_it_is(tmp_path: Path, token: int) -> None:
    async def client(desk: Desk) -> bytes:
        call = asyncio.ensure_future(desk.ask(response_format=of_schema(SCHEMA)))
        (engine,) = desk.engines
        await desk.until(engine.ids)
        desk.say(0, (engine.ids()[0], token, float("nan"), "error"))
        return await call

    error = answer_of(run(tmp_path, client))["error"]
    grammar = token == NO_TOKEN
    assert error["code"] == ("grammar_failed" if grammar else "logits_not_finite")
    assert (error["message"] == GRAMMAR_FAILED) == grammar


@needs_library
def test_the_end_of_a_grammar_has_no_text(tmp_path: Path) -> None:
    async def client(desk: Desk) -> bytes:
        body = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
        call = asyncio.ensure_future(desk.ask(response_format=body, logprobs=1))
        (engine,) = desk.engines
        await desk.until(engine.ids)
        desk.say(0, (engine.ids()[0], ord("7"), -0.5, None))
        desk.say(0, (engine.ids()[0], NO_TOKEN, 0.0, "stop"))
        return await call

    answer = answer_of(run(tmp_path, client))
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == 1
    assert (choice["text"], choice["finish_reason"]) == ("7", "stop")
    assert choice["logprobs"]["tokens"] == ["7"]
