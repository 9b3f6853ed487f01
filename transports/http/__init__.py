"""The server's side of HTTP on sockets: connections, TLS, HTTP/1.1 and HTTP/2, and hypercorn in their place.

All of them yield the one exchange of `runtime/http/exchanges.py`. Reading
order: `server.py`, `driver.py`, `http1/connection.py`, `output.py`. The client's side is
`transports/openai/client.py`; what both stand on, `transports/sockets/`.
"""
