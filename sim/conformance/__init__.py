"""The simulator held to the kernel: one scenario on loopback sockets in real time, compared."""
