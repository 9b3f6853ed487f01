"""Engines of programs that import trinamo: one async generator that yields text, or `Delta`s.

`definition` is the decorator and how what it decorates is opened, `serving` the engine that asks
the generator, `items` what its items become, `stalls` how long it holds the event loop,
`asyncio_engines` the generators of asyncio, `loading` the names on the command line, `telling` what an
engine has raised.
"""
