"""What a transport implements: the interfaces of the planes, and the values that they speak in.

A *plane* is a kind of traffic, a *transport* a technology that carries it. `docs/write_a_transport.md`
writes one, `trinamo.conformance` holds it to what its interface promises, and `trinamo.Transports` is how a program
puts planes of its own behind a process.
"""

from .runtime.planes import *  # noqa: F403 -- `__all__` there is the list of what is public
