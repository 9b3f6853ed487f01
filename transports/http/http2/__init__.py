"""HTTP/2 over the `h2` library. Read `connection.py` first."""
