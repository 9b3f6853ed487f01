"""Serving an ASGI application with hypercorn: sockets, connections, heads."""
