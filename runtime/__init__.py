"""What things are and how they behave: the ground floor.

One room a concern; the first four are also the way of one request:

1. `http/`            the edge: routes, server-sent events, status codes, models
2. `caller/`          which instance: the live set, load, faults; request out, response stream in
3. `worker/`          the worker's end: being found, admit, run the handler, stream back
4. `engines/`         what an engine is; echo, exact, mocker, llamacpp; the step loop they share

`process/` holds the nurseries that own it all, and the order in which they end. `kv/` is block
memory and how it moves, `queues/` work queues, `events/` what must not be missed, `planes/` what a
transport must offer, `protocol/` bytes, events and tables, sans-IO; `config/`, `metrics/`, `logs/`
are what they say. What everything imports is here: `errors.py`, `context.py` (one request's
cancellation), `env.py` (the seam the simulator replaces), `nurseries.py`, `deadlines.py`,
`asyncio_loop.py` (what is written for asyncio runs there).

What is public of it, `import trinamo` offers (`src/trinamo/__init__.pyi`).
"""
