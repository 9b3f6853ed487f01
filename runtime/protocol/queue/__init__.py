"""The model of a work queue, and what its consumer decides."""
