"""Model files between processes: a worker without the file takes it from one that has it.

Start with `messages.py`, what the two tell each other. `lender.py` offers files and lends them chunk
by chunk over registered memory; `taker.py` reads them, checks each, and goes on elsewhere after a
break; `files.py` is the disk. `docs/weights.md` tells it all.
"""
