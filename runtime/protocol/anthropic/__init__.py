"""Anthropic's API, in whose words a chat may be asked and answered."""
