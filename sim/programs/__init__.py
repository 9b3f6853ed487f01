"""Scenarios: a small cluster of real code in a world, a plan of faults, and what must hold.

A scenario module offers a frozen plan, a `run` that plays it on given choices, and an outcome
whose `violations` name the broken invariants of the protocol. Tests fix plans, properties draw
them. First one: `response_stream.py`.
"""
