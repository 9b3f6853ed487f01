"""The tcp transfer plane: KV blocks over streams."""
