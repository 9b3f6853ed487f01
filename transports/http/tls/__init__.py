"""TLS towards clients: the certificate and its renewal, the handshake, and the cipher of one connection."""
