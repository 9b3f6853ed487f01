"""`trinamo bench`: what the transfer backends do on this machine."""
