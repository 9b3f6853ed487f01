"""What may change while the cluster runs: the settings, and the configuration with them in place."""
