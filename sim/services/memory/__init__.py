"""One-sided memory between simulated hosts."""
