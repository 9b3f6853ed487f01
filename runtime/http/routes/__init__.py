"""What a frontend answers besides inference, for operators and their tools."""
