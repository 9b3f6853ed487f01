"""TLS towards clients: the certificate and its renewal, and the cipher of one connection."""
