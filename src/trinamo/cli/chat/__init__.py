"""`trinamo chat`: ask the cluster, and see the answer as it is generated."""
