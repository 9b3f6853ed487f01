"""The policy `kv`: who holds a prompt's blocks, how busy each is predicted to be, and what a choice costs."""
