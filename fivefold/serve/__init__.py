"""Serving: a model behind the OpenAI API, on this machine.

The door is one process with an event loop: it reads HTTP, checks, queues, turns text into tokens
and back, and answers. Each replica is an engine in processes of its own, one for every rank of its
layout; rank 0 of it talks to the door over a socket of this machine, and tells the others what to
do before every step. So a slow client, a long prompt or a large answer never delays a forward.

    http.py       one connection: what it may send, how long it may take, when it has gone
    asked.py      the body of a request, checked; errors in the shape of the API
    answers.py    the choices of a request as they grow, and the JSON of them
    waiting.py    who waits, in turn between clients
    links.py      messages between processes
    kv_links.py   caches on their way between engines, from rank to rank
    rank.py       the loop of a rank: commands in, steps, drawn tokens out
    keeper.py     the processes of an engine, and new ones if a rank dies
    replicas.py   what the door knows of an engine, and which one takes a request
    door.py       the paths, keys, logs, and the end after SIGTERM
    prompting.py  prompts and chats to tokens, beside the event loop
    metrics.py    numbers as Prometheus reads them
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
