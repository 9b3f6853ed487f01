"""The log of a process.

What a line may hold (`text`), the fields that every line gets (`fields`), its form (`formats`), how
many lines of a kind are written (`floods`), lines of which several parts write the same
(`notices`), those about HTTP requests (`access`), and `setup_log`. The code logs through the
standard library: a short constant sentence, and what varies as its arguments.
"""
