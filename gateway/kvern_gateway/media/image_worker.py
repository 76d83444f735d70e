"""Decodes and prepares images in a process of its own: see kvern_gateway.processes.

The set-up is JSON: the model's and its image processor's configuration, and the limits. Each request is an image file, each
answer a byte that says what follows: 0, a kvern.v1.MediaItem; 1, what is wrong with the image.
"""

from __future__ import annotations

import io
import json
import signal
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from kvern_gateway import child
from kvern_gateway.media.prepare import Preparation, Unprepared, preparation

MEMORY_BYTES = 2 * 2**30
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def prepared(data: bytes, prepare: Preparation, max_pixels: int) -> bytes:
    """Raises Unprepared with what is wrong."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            # Known from the file's head: nothing has been decoded yet.
            width, height = image.size
            if width * height > max_pixels:
                raise Unprepared(f"has {width} × {height} pixels; it may have {max_pixels} in all")
            if not width or not height:
                raise Unprepared("has no pixels")
            image.load()
            return prepare(ImageOps.exif_transpose(image)).SerializeToString()
    except Unprepared:
        raise
    except UnidentifiedImageError:
        raise Unprepared(f"is no image of a known format ({', '.join(FORMATS)})") from None
    except MemoryError:
        raise Unprepared("takes too much memory to decode") from None
    except Exception:  # A library of many decoders raises whatever they do.
        raise Unprepared("is damaged, or ends early") from None


def main() -> None:
    child.confine(MEMORY_BYTES)
    setup: dict[str, Any] = json.loads(child.receive())
    prepare = preparation(setup["model"], setup["processor"])
    assert prepare is not None, "the gateway has asked before"
    # The limit is ours, and comes before the decoder's.
    Image.MAX_IMAGE_PIXELS = None
    child.send(b"")
    while True:
        data = child.receive()
        # Its default action ends the process, also inside a decoder.
        signal.setitimer(signal.ITIMER_PROF, setup["timeout_s"])
        try:
            answer = b"\0" + prepared(data, prepare, setup["max_pixels"])
        except Unprepared as error:
            answer = b"\1" + str(error).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        child.send(answer)


if __name__ == "__main__":
    main()
