"""The composition root: which transport carries which plane of a process, by configuration.

The only place that may import every transport; a library is imported once it is configured.
`planes.py` opens control, events and requests, and servers of our own, `transfers.py` the backends of KV
transfers; `process.py` and `engines.py` are what `import trinamo` offers of it.
"""
