"""Serving: a model behind the OpenAI API, on this machine.

The API is one process with an event loop: it reads HTTP, checks, queues, turns text into tokens
and back, and answers. Each replica is an engine in processes of its own, one for every rank of its
layout; its rank 0 talks to the API over a local socket, and broadcasts commands before every step.
So a slow client, a long prompt or a large answer never delays a forward.

    http.py       one connection: what it may send, how long it may take, when it has gone
    schema.py     the body of a request, checked; errors in the format of OpenAI
    answers.py    the choices of a request as they grow, and the JSON of them
    queue.py      requests that wait, in turn between clients
    links.py      messages between processes
    kv_links.py   caches on their way between engines, from rank to rank
    rank.py       the loop of a rank: commands in, steps, drawn tokens out
    supervisor.py the processes of an engine, and new ones if a rank dies
    replicas.py   the state of an engine as the API sees it, and which one takes a request
    api.py        paths, keys, logs, and draining after SIGTERM
    prompting.py  prompts and chats to tokens, beside the event loop
    metrics.py    numbers as Prometheus reads them
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
