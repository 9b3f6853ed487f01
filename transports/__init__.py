"""How things travel: one package per technology, each behind the interfaces of `runtime.planes`.

None imports another; only `assembly/` knows them all and chooses among them.
"""
