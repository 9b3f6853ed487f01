"""An HTTP client for the questions that processes ask each other."""
