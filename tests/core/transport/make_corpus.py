# SPDX-License-Identifier: Apache-2.0
"""Writes the inputs of corpus/ that were made by hand; the fuzzer has found the others.

python tests/core/transport/make_corpus.py
"""

import struct
from pathlib import Path

_MESSAGE, _ABORT, _HEARTBEAT, _GOODBYE = 1, 2, 3, 4


def frame(kind: int, header: int = 0, stream: int = 0, part: int = 0, payload: int = 0) -> bytes:
    """A frame's fixed header; the fuzz target makes the check word right."""
    return struct.pack("<BBHIIIQ", kind, 0, header, stream, part, 0, payload)


def piece(data: bytes) -> bytes:
    """What is sent at once: at most 127 bytes, or a multiple of 37."""
    if len(data) < 128:
        return bytes([len(data)]) + data
    assert len(data) % 37 == 0
    return bytes([len(data) // 37]) + data


_FIRST = frame(_MESSAGE, header=3, part=5, payload=10) + b"hdr" + b"01234"
_NEXT = frame(_MESSAGE, part=5, payload=10) + b"56789"
_LARGE = frame(_MESSAGE, header=3, part=8000, payload=8000) + b"hdr"
# After a frame of 16 KiB comes the next socket's turn.
_TURNS = frame(_MESSAGE, header=3, part=1 << 14, payload=1 << 14) + b"hdr" + bytes(1 << 14)

_SEQUENCES = {
    "one_frame": [frame(_MESSAGE, header=8, part=8, payload=8) + b"headerhepayload!"],
    "no_payload": [frame(_MESSAGE, header=8) + b"headerhe"],
    "two_frames": [_FIRST, _NEXT],
    "two_streams": [
        _FIRST,
        frame(_MESSAGE, header=1, stream=63, part=2, payload=4) + b"hab",
        _NEXT,
        frame(_MESSAGE, stream=63, part=2, payload=4) + b"cd",
    ],
    "aborted": [_FIRST, frame(_ABORT), _FIRST, _NEXT],
    "heartbeats": [frame(_HEARTBEAT), _FIRST, frame(_HEARTBEAT), _NEXT],
    "goodbye": [_FIRST, _NEXT, frame(_GOODBYE), _FIRST],
    "bad_kind": [frame(200)],
    "bad_stream": [frame(_MESSAGE, header=1, stream=64)],
    "bad_order": [_NEXT],
    "beyond": [_FIRST, frame(_MESSAGE, part=6, payload=10) + b"567890"],
    "huge_header": [frame(_MESSAGE, header=4096, payload=1 << 47)],
    "large": [(_LARGE + bytes(8000))[: 37 * 200], bytes(37 * 20)],
}


def main() -> None:
    """Writes every sequence over a socket and over a ring."""
    folder = Path(__file__).parent / "corpus"
    folder.mkdir(exist_ok=True)
    for name, frames in _SEQUENCES.items():
        for mode, over in ((2, "socket"), (3, "ring")):
            data = bytes([mode]) + b"".join(piece(part) for part in frames)
            (folder / f"{name}_{over}").write_bytes(data)
    # Pieces that begin frames come first: their numbers are those of the frames.
    rest = _TURNS[9435:]
    turns = [(0, _TURNS[:9435]), (1, _FIRST), (1, _NEXT), (0, rest[:6956]), (0, rest[6956:])]
    (folder / "turns_sockets").write_bytes(
        bytes([6]) + b"".join(bytes([socket]) + piece(part) for socket, part in turns)
    )
    whole = b"".join(_SEQUENCES["two_streams"])
    (folder / "wrong_check").write_bytes(b"\0" + piece(_FIRST))
    (folder / "byte_by_byte").write_bytes(
        b"\0" + b"".join(piece(whole[i : i + 1]) for i in range(60))
    )


if __name__ == "__main__":
    main()
