"""The message broker as a host of the world, and the event plane over it."""
