"""Calls of a door: their choices, and messages about them to and from the dispatcher."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from typing import Any

from fivefold.core.model import Shape
from fivefold.generate import GRAMMAR_FAILED, NOT_FINITE, Codec, Grammars, Request, Sampling
from fivefold.serve.answers import ServedCall, ServedChoice
from fivefold.serve.links import (
    AskMetrics,
    BeginCall,
    CallRows,
    DrawnRow,
    EndCall,
    EndRequest,
    FailedCall,
    MetricsText,
    RestartedRequest,
    ServerState,
)
from fivefold.serve.schema import ApiError, AskedText, wrong


class DoorCalls:
    """The open calls of a door."""

    def __init__(
        self, shape: Shape, codec: Codec, ends: frozenset[int], send: Callable[[Any], None]
    ) -> None:
        """`send` sends a message to the dispatcher."""
        self.shape, self.codec, self.ends, self.send = shape, codec, ends, send
        self.grammars, self.named = Grammars(codec, shape.vocab), codec.named()
        self.state = ServerState()
        self._calls: dict[str, ServedCall] = {}
        self._choices: dict[str, ServedChoice] = {}
        self._texts: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count()

    def call(
        self,
        id: str,
        client: str,
        text_request: AskedText,
        prompts: list[tuple[int, ...]],
        began: float,
        adapter: int = 0,
    ) -> ServedCall:
        """Create a call with its choices, and validate them."""
        call = ServedCall(id, client, text_request, sum(map(len, prompts)), began)
        seed = secrets.randbits(63) if text_request.seed is None else text_request.seed
        sampling = Sampling(
            text_request.temperature,
            text_request.top_k,
            text_request.top_p,
            seed,
            text_request.min_p,
        )
        tokens = frozenset(self.named[stop] for stop in text_request.stops if stop in self.named)
        texts = tuple(stop for stop in text_request.stops if stop not in self.named)
        tokens |= self._stop_tokens(text_request.stop_token_ids)
        scores = text_request.prompt_alternatives
        scores = None if scores is None else min(scores, self.shape.vocab)
        for number, prompt in enumerate(prompts):
            limit, echo = self._limit(prompt, text_request), ""
            if text_request.echo:
                shown = text_request.prompts[number]
                echo = shown if isinstance(shown, str) else self.codec.decode(shown)
            for copy in range(text_request.n):
                request = Request(
                    f"{id}/{next(self._numbers)}",
                    prompt,
                    limit,
                    sampling,
                    tokens if text_request.ignore_eos else self.ends | tokens,
                    seed_key=f"choice {copy}",
                    alternatives=min(text_request.alternatives, self.shape.vocab),
                    min_tokens=text_request.min_tokens,
                    # All choices of a chat have one prompt, which its answer has once.
                    prompt_logprobs=None if text_request.chat and copy else scores,
                    grammar=text_request.grammar,
                    adapter=adapter,
                )
                index = len(call.choices)
                call.choices.append(ServedChoice(call, index, request, self.codec, texts, echo))
        return call

    def _stop_tokens(self, tokens: tuple[int, ...]) -> frozenset[int]:
        """The tokens that end a completion, all of the vocabulary."""
        if bad := next((token for token in tokens if not 0 <= token < self.shape.vocab), None):
            rule = f"token {bad} is not in the vocabulary: give tokens below {self.shape.vocab:,}"
            raise wrong("stop_token_ids", rule)
        return frozenset(tokens)

    def _limit(self, prompt: tuple[int, ...], request: AskedText) -> int:
        """The tokens that may be drawn; refuses a prompt that leaves no room for them."""
        param, longest = "messages" if request.chat else "prompt", self.state.longest
        if not prompt:
            raise ApiError(400, f"{param}: it has no token", param, "invalid_value")
        max_tokens = request.max_tokens
        if len(prompt) + (max_tokens or 1) > longest:
            asks = "" if max_tokens is None else f" and {max_tokens:,} more are asked for"
            rule = f"the prompt has {len(prompt):,} tokens{asks}; {longest:,} is the limit"
            advice = "shorten the prompt" if max_tokens is None else "shorten one of them"
            raise ApiError(400, f"{rule}: {advice}", param, "context_length_exceeded")
        if bad := next((token for token in prompt if not 0 <= token < self.shape.vocab), None):
            rule = f"token {bad} is not in the vocabulary of {self.shape.vocab:,}"
            raise ApiError(400, f"{param}: {rule}", param, "invalid_value")
        limit = longest - len(prompt) if max_tokens is None else max_tokens
        if request.min_tokens > limit:
            rule = f"{request.min_tokens:,} are more than the {limit:,} that may be drawn"
            raise wrong("min_tokens", f"{rule}: give fewer, or a larger max_tokens")
        return max(1, limit)  # of 0 the engine draws a token too, which no answer has

    def begin(self, call: ServedCall) -> None:
        """Queue a call; it fails if it is refused."""
        self._calls[call.id] = call
        self._choices |= {choice.id: choice for choice in call.choices}
        requests = tuple(choice.request for choice in call.choices)
        streams = call.request.stream
        self.send(BeginCall(call.id, call.client, streams, call.prompt_tokens, requests))

    def end(self, call: ServedCall) -> None:
        """Abort a call whose client has disconnected, or forget one that has ended."""
        del self._calls[call.id]
        for choice in call.choices:
            self._choices.pop(choice.id, None)
        is_complete = call.ended and call.error is None
        self.send(EndCall(call.id, time.monotonic() - call.began if is_complete else None))

    def fail_all(self, error: ApiError) -> None:
        """Fail all open calls."""
        for call in self._calls.values():
            call.fail(error)

    async def metrics(self) -> str:
        """Text of /metrics, of all doors and engines."""
        number, text = next(self._numbers), asyncio.get_running_loop().create_future()
        self._texts[number] = text
        self.send(AskMetrics(number))
        return await text

    def take(self, values: list[Any]) -> None:
        """Take messages of the dispatcher; what several steps have drawn is sent at once."""
        updated: dict[ServedCall, None] = {}
        for value in values:
            if isinstance(value, CallRows):
                for id, token, logprob, rank, alternatives in value.prompt_rows:
                    if (choice := self._choices.get(id)) is not None:
                        choice.score(token, logprob, rank, alternatives)
                for row in value.rows:
                    choice = self._choices.get(row[0])
                    if choice is not None and choice.reason is None:
                        self._push(choice, row)
                        updated[choice.call] = None
            elif isinstance(value, FailedCall):
                if (call := self._calls.get(value.id)) is not None:
                    call.fail(ApiError(*value.error))
            elif isinstance(value, RestartedRequest):
                self._restart(value)
            elif isinstance(value, MetricsText):
                if not (text := self._texts.pop(value.number)).done():
                    text.set_result(value.text)
            elif isinstance(value, ServerState):
                self.state = value
        for call in updated:
            try:
                call.update()
            except Exception as error:  # of what it is to write: the other calls go on
                rule = f"the answer cannot be written: {type(error).__name__}: {error}"
                call.fail(ApiError(500, rule))

    def _push(self, choice: ServedChoice, row: DrawnRow) -> None:
        _, token, logprob, reason, alternatives = row
        try:
            if reason == "error" and token < 0:
                choice.fail(ApiError(500, GRAMMAR_FAILED, None, "grammar_failed"))
            elif reason == "error":
                choice.fail(ApiError(500, NOT_FINITE, None, "logits_not_finite"))
            else:
                choice.push(token, logprob, reason, alternatives)
        except Exception as error:  # of a tokenizer: the other calls go on
            rule = f"the tokens cannot be decoded: {type(error).__name__}: {error}"
            choice.call.fail(ApiError(500, rule))
        if reason is None and choice.reason is not None:  # by a text that the engine does not see
            self.send(EndRequest(choice.call.id, choice.id))

    def _restart(self, restarted: RestartedRequest) -> None:
        choice = self._choices.pop(restarted.id, None)
        if choice is None:  # its call has ended, which the dispatcher will hear
            return
        if choice.reason is None:
            choice.begin(restarted.new_id)
            self._choices[choice.id] = choice
        else:
            self.send(EndRequest(choice.call.id, restarted.new_id))
