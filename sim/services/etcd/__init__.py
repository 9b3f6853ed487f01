"""The control store as a host of the world, and the control plane over it."""
