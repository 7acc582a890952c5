"""The server of the page: it listens on loopback only, and refuses pages of other sites.

A search takes seconds. It runs in a process of its own, so that sliders stay quick, and the process
ends when the browser drops the question.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fivefold.core import FivefoldError
from fivefold_page import document
from fivefold_page.document import answer, refusal
from fivefold_page.explore import explore
from fivefold_page.run import RunSource
from fivefold_page.view import View

HOST = "127.0.0.1"
_LARGEST = 2_000_000  # bytes of a question; a pasted config may have one million
_POLL_S = 0.1
_NICE = 5
_COLLECT = (50_000, 20, 50)  # an answer makes many small values: collecting takes a tenth of it
_GRACE_S = 1  # for open answers when the server ends
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def application(start: document.PageStart, run: RunSource | None) -> Starlette:
    """The page and its answers."""
    searching = asyncio.Lock()  # one search at a time leaves processors to the quick questions

    async def page(request: Request) -> Response:
        text, policy = document.live_page(start)
        headers = {"content-security-policy": policy, **_HEADERS}
        return Response(text, media_type="text/html", headers=headers)

    async def library(request: Request) -> Response:
        return FileResponse(document.plotly(), media_type="text/javascript")

    async def ask(request: Request) -> Response:
        own = f"http://{request.headers.get('host', '')}"
        if request.headers.get("origin", own) != own:
            return JSONResponse({"error": "another site may not ask"}, 403)
        name = request.path_params["name"]
        try:
            params = await _params(request)
            if name in explore.searches():
                lines = _search_lines(name, params, searching)
                return StreamingResponse(lines, media_type="application/x-ndjson")
            result = await run_in_threadpool(answer, name, params, run)
        except FivefoldError as error:
            return JSONResponse(refusal(error), 422)
        except Exception as error:  # the page says so, and clears what it showed
            traceback.print_exc()
            message = f"the answer failed ({type(error).__name__}: {error}): please report it"
            return JSONResponse({"error": message}, 500)
        return JSONResponse(result)

    routes = [
        Route("/", page),
        Route("/plotly.js", library),
        Route("/ask/{name:path}", ask, methods=["POST"]),
        Mount("/static", StaticFiles(directory=document.STATIC)),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


def serve(
    start: document.PageStart, run: RunSource | None, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve until a signal ends it; `on_ready` gets the address."""
    document.plotly()
    # asyncio sets TCP_NODELAY only if the protocol is named; else answers wait for an ACK.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # before on_ready: a browser may connect at once
    except OSError as error:
        listener.close()
        raise FivefoldError(f"port {port}: {error.strerror}; give another --port, or 0") from error
    app = application(start, run)
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=_GRACE_S
    )
    server = uvicorn.Server(config)
    # After its shutdown uvicorn raises the signal again; the exit code must be 0.
    signal.signal(signal.SIGTERM, _exit)
    gc.collect()
    gc.freeze()  # loaded modules stay; scanning them again and again would delay answers
    gc.set_threshold(*_COLLECT)
    on_ready(f"http://{HOST}:{listener.getsockname()[1]}/")
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


async def _params(request: Request) -> dict[str, str]:
    """The parameters of a question: a JSON object of texts, of limited size."""
    body = bytearray()
    async for block in request.stream():
        body += block
        if len(body) > _LARGEST:
            raise FivefoldError(
                f"a question of more than {_LARGEST:,} bytes: a config.json has a few thousand"
            )
    try:
        payload: Any = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise FivefoldError(f"not valid JSON: {error}; mend it") from error
    if not isinstance(payload, dict):
        raise FivefoldError("a question is a JSON object of texts")
    texts: dict[str, str] = {}
    for name, value in payload.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(value, str):
            raise FivefoldError(f"{name!r} must be a text")
        texts[str(name)] = value  # pyright: ignore[reportUnknownArgumentType]
    return texts


async def _search_lines(
    name: str, params: dict[str, str], searching: asyncio.Lock
) -> AsyncIterator[str]:
    """Lines of progress, then the answer; a closed connection ends the search."""
    async with searching, contextlib.aclosing(_worker_lines(name, params)) as lines:
        async for line in lines:
            yield line


async def _worker_lines(name: str, params: dict[str, str]) -> AsyncGenerator[str]:
    """Start a worker, and pass on its messages as lines of JSON."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(theirs, name, params), daemon=True)
    worker.start()
    theirs.close()
    try:
        while True:
            if not await asyncio.to_thread(ours.poll, _POLL_S):
                continue
            message: View = ours.recv()
            yield json.dumps(message) + "\n"
            if "progress" not in message:
                return
    except EOFError:
        yield json.dumps({"error": "the worker died; see the server's output"}) + "\n"
    finally:
        worker.terminate()
        worker.join()
        ours.close()


def _work(pipe: Connection, name: str, params: dict[str, str]) -> None:
    """In the worker: answer one search at low priority; a closed pipe ends it."""
    os.nice(_NICE)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        try:
            result = explore.searches()[name](params, lambda share: pipe.send({"progress": share}))
        except FivefoldError as error:
            result = refusal(error)
        pipe.send(result)
