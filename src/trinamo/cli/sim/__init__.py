"""`trinamo sim`: the cluster under a virtual clock, broken on purpose, replayed exactly."""
