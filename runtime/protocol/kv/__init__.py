"""What a worker tells about the KV blocks it holds."""
