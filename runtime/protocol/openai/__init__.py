"""OpenAI's API as structs, what it means to an engine, and how it looks on the wire."""
