"""The log of a process.

What a line may hold (`text`, `masking`), the fields that every line gets (`fields`), its form
(`formats`), how many lines of a kind are written (`floods`), the lines about requests (`requests`,
`access`), and `setup_log`. The code logs through
the standard library: a short constant sentence, and what varies as its arguments.
"""
