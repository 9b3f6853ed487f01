"""What decode and prefill workers agree on: where a prompt is computed, and what they say about it."""
