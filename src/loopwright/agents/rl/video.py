"""Videos of evaluation episodes: small animated PNGs, which every browser shows. Requires numpy."""

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_MAX_SIDE = 240
_MAX_FRAMES = 120
MAX_BYTES = 700_000
"""Of one video. A run keeps two, those of the last and of the best policy; in base64 they take less than 2 MB."""


class VideoRecorder:
    """Collects the frames of one episode, evenly spread: however long it is, there are at most 120."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._frames: list[Any] = []
        self._every, self._count = 1, 0

    def record(self, render: Callable[[], Any]) -> None:
        """Called after the reset and after every step. `render` is called for the frames that are kept."""
        if self._count % self._every == 0:
            self._frames.append(_shrink(render()))
            if len(self._frames) > _MAX_FRAMES:
                self._frames, self._every = self._frames[::2], 2 * self._every
        self._count += 1

    def encode(self) -> bytes:
        """The video, with fewer frames if it would be too large."""
        frames, delay_s = self._frames, self._every / self._fps
        while len(data := animated_png(frames, delay_s)) > MAX_BYTES and len(frames) > 1:
            frames, delay_s = frames[::2], 2 * delay_s
        return data


def _shrink(frame: Any) -> Any:
    """A frame of at most 240 pixels a side, by the mean of square blocks."""
    image = np.asarray(frame)
    if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(f"render() returned an array of the shape {image.shape}, not (height, width, 3)")
    size = math.ceil(max(image.shape[:2]) / _MAX_SIDE)
    height, width = (max(1, side // size) for side in image.shape[:2])
    blocks = image[: height * size, : width * size].reshape(height, -1, width, min(size, image.shape[1]), 3)
    return blocks.mean(axis=(1, 3)).astype(np.uint8)


def animated_png(frames: Sequence[Any], delay_s: float) -> bytes:
    """Frames of one size as an endless animation. PNG readers that know no animations show the first."""
    height, width, _ = frames[0].shape
    if any(frame.shape != frames[0].shape for frame in frames):
        raise ValueError("render() returned frames of different sizes")
    delay_ms = min(60_000, max(1, round(1000 * delay_s)))
    parts = [
        b"\x89PNG\r\n\x1a\n",
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        _chunk(b"acTL", struct.pack(">II", len(frames), 0)),
    ]
    sequence = 0
    for frame in frames:
        parts.append(_chunk(b"fcTL", struct.pack(">IIIIIHHBB", sequence, width, height, 0, 0, delay_ms, 1000, 0, 0)))
        # Each row as its difference from the one above (filter 2), which compresses well.
        rows = np.full((height, 1 + 3 * width), 2, np.uint8)
        rows[:, 1:] = np.diff(frame.reshape(height, -1), axis=0, prepend=np.uint8(0))
        data = zlib.compress(rows.tobytes(), 6)
        if sequence == 0:
            parts.append(_chunk(b"IDAT", data))
        else:
            sequence += 1
            parts.append(_chunk(b"fdAT", struct.pack(">I", sequence) + data))
        sequence += 1
    return b"".join([*parts, _chunk(b"IEND", b"")])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
