"""HTTP/1.1 in clear text, spoken by ourselves: httptools parses heads, trio waits, nobody wakes in vain."""
