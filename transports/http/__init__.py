"""The edge: sockets, connections, TLS, HTTP/1 and HTTP/2, and hypercorn in their place."""
