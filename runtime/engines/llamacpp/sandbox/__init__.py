"""What strangers wrote is tried in a child process that the kernel bounds."""
