"""One open socket, in clear or in TLS, the kernel's or a simulated one: what the rooms of transports share."""
