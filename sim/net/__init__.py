"""The simulated network: links, TCP, sockets, and a message bus."""
