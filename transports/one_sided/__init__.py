"""What the backends of one-sided transfers share: regions, transfers, and a plane over a backend."""
