"""Moving KV blocks: descriptions, access, settlement, the messages of a tcp transfer."""
