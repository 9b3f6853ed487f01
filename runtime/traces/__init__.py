"""What became of the last requests in this process, leg by leg: for `trinamo trace`."""
