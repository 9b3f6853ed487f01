"""`trinamo status`: who is alive, serving what."""
