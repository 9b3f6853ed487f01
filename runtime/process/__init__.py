"""What one process is: the nurseries that own it, what it is made of, and the order in which it ends."""
