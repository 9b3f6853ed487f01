"""A disk for each host: what its processes see, and what is left when the power fails."""
