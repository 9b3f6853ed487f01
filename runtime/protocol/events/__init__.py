"""Events in order: numbers, gaps, snapshots."""
