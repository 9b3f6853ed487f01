"""`trinamo trace`: one request's legs over all processes, on a time line."""
