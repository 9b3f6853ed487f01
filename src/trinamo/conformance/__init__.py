"""What every transport promises, as tests: a pytest class for each interface of `trinamo.planes`.

A class is made a suite of yours by a fixture `open_plane`, the *maker*: called once or several times, it
opens planes over one store or broker, each as of a process of its own.

    from trinamo.conformance import ControlPlaneConformance

    class TestMyControlPlane(ControlPlaneConformance):
        @pytest.fixture
        def open_plane(self, tmp_path):
            return partial(open_my_control_plane, tmp_path / "store")

It needs pytest and pytest-trio (`trinamo[cluster,testing]`), and no mode of theirs. Our own transports are held to
these very classes; `docs/write_a_transport.md` builds a transport by them. Breaking connections and servers
is each transport's own to test: no two break alike.
"""

from .control import ControlPlaneConformance as ControlPlaneConformance
from .events import EventPlaneConformance as EventPlaneConformance
from .queues import WorkQueueConformance as WorkQueueConformance
