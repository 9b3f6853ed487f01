"""How KV blocks get from one engine to another: peers, grants, routes, and the proof that all is settled."""
