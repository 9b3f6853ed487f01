"""The log of a process.

What a line may hold (`text`), the fields that every line gets (`fields`), its form (`formats`), lines of which several parts write the same
(`notices`), those about HTTP requests (`access`), and `setup_log`, which holds back
floods. The code logs through the
standard library: a short constant sentence, and what varies as its arguments.
"""
