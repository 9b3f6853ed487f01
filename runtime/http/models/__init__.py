"""Which models are served, and where: the registry, and the cards it is filled from."""
