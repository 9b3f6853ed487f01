"""The reference transformer: tiny, seeded, and exact to the last bit."""
