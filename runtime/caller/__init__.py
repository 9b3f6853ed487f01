"""The caller's side of a request: which instance gets it, and the stream that comes back."""
