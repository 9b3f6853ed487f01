"""The server that hypercorn speaks HTTP for, and what mends hypercorn. Read `driver.py` first."""
