"""Events that must not be missed, and what workers say about themselves."""
