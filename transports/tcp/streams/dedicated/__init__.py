"""The dedicated carrier: one connection for each stream, dialled by the worker."""
