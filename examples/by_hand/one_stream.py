"""A peer of forty lines: it asks a worker by hand, and reads the one stream that answers.

    python examples/by_hand/one_stream.py

What it writes and reads is what tcpdump shows of a frontend and a worker without a secret (with one TLS
is around it, from the welcome on): a greeting, which says what is spoken and what for, and then frames, which
`runtime/protocol/streams/link_frames.py` lists. An item over 16 KiB would come in parts, and whoever is
to read more than the window that it offers gives credit back; neither is needed here.
"""

import json
import struct

import trio

from trinamo import EndpointName, load_config, open_runtime

ENDPOINT = EndpointName("examples", "counter", "count")
MEMORY = {"control_plane.backend": "memory", "event_plane.backend": "memory"}
PROLOGUE, DATA, BATCH, SENTINEL, REQUEST = 2, 3, 5, 6, 13
# Magic, version 3.0, the port for requests, and no TLS.
HELLO = b"trinamo\r\n\r\n" + b"\3\0" + b"r" + b"\0"


async def read(stream, count):
    data = b""
    while len(data) < count:
        data += await stream.receive_some(count - len(data))
    return data


async def greet(stream):
    await stream.send_all(HELLO)
    # The worker's version, the hello as it heard it, and how long its name is.
    welcome = await read(stream, 2 + len(HELLO) + 1)
    return await read(stream, welcome[-1])


async def ask(address, envelope, payload):
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        print("greeted by", (await greet(stream)).decode())
        header = struct.pack(">IB", 0, REQUEST) + json.dumps(envelope).encode()
        await stream.send_all(struct.pack(">II", len(header), len(payload)) + header + payload)
        kind = None
        while kind != SENTINEL:
            header_bytes, data_bytes = struct.unpack(">II", await read(stream, 8))
            header, data = await read(stream, header_bytes), await read(stream, data_bytes)
            number, kind = struct.unpack(">IB", header[:5])
            if kind == BATCH:  # Items of one step: pairs of stream and length, then their bytes.
                print("items", [length for _, length in struct.iter_unpack(">II", header[5:])])
            else:
                print(f"stream {number}, kind {kind}: {data!r}")


async def count(number, context):
    for each in range(number):
        yield each


async def main():
    config = load_config(environ={}, overrides=MEMORY)
    async with open_runtime(config, serving=True) as runtime:
        await runtime.serve(ENDPOINT, count, request_type=int)
        (instance,) = (await runtime.control.range("instances/")).entries
        address = json.loads(instance.value)["transports"]["tcp"]
        response = {"address": address, "subject": "by hand", "stream_type": "Response"}
        response |= {
            "carrier": "multiplexed",
            "window_bytes": 65536,
        }  # The stream comes on this link.
        envelope = {"id": "1", "endpoint": str(ENDPOINT), "response": response}
        await ask(address, envelope, b"\x03")  # The payload is MessagePack: the number 3.


if __name__ == "__main__":
    trio.run(main)
