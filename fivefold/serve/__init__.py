"""Serving: a model behind the OpenAI API, on this machine.

Doors are processes with an event loop: they read HTTP, check, turn text into tokens and back, and
answer. The dispatcher queues requests and moves tokens between doors and replicas. Each replica is
an engine in processes of its own, one for every rank of its layout; its rank 0 talks to the
dispatcher over a local socket, and broadcasts commands before every step. So a slow client, a long
prompt or a large answer never delays a forward.

    http.py       one connection: what it may send, how long it may take, when it has gone
    schema.py     the body of a request, checked; errors in the format of OpenAI
    door.py       the processes of doors, and new ones if one dies
    calls.py      the open calls of a door, and messages about them
    answers.py    the choices of a request as they grow, and the JSON of them
    dispatch.py   calls of doors to replicas and tokens back
    routed.py     calls as the dispatcher sees them
    queue.py      requests that wait, in turn between clients
    links.py      messages between processes
    kv_links.py   caches on their way between engines, from rank to rank
    rank.py       the loop of a rank: commands in, steps, drawn tokens out
    supervisor.py the processes of an engine, and new ones if a rank dies
    replicas.py   the state of an engine as the dispatcher sees it, and which one takes a request
    api.py        paths, keys, logs, and draining after SIGTERM
    prompting.py  prompts and chats to tokens, beside the event loop
    metrics.py    numbers as Prometheus reads them
"""

from fivefold.faces import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
