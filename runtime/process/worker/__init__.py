"""What a worker consists of, a module for each part: its models, its role, its weights."""
