"""What a frontend consists of, a module for each part: its models, its upstreams, its dashboard."""
