"""The front door: `trinamo up`, `frontend`, `worker`, `status`, `chat`, `doctor`.

The only package that names concrete transports; nothing imports it. Reading order: `main` (the
commands), `options` (where settings come from), `up` and `cluster` (a whole cluster on one
machine, made of `child` processes), `roles` and `planes` (what one process runs). Heavy libraries
are imported inside the commands that need them, so that `trinamo --help` answers at once.
"""
