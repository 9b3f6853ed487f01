"""Mistakes that are put into the code on purpose, to see that a scenario finds them."""
