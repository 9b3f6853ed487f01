"""HTTP/2 over the `h2` library, in place of hypercorn's. Read `protocol.py` first."""
