"""HTTP/1.1: httptools parses heads, trio waits, nobody wakes in vain."""
