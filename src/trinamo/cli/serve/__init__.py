"""`trinamo worker` and `trinamo frontend`: one process of a cluster, until a signal ends it."""
