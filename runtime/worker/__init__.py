"""The worker's side of a request: being found, admitting, running the handler, streaming back."""
