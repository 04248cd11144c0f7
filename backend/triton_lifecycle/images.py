"""Images of a request: from base64 texts to pictures in memory, checked once, within limits.

What the official backend takes is taken: base64, with or without ``data:…;base64,`` before it. Nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from triton_lifecycle.errors import InvalidInput

if TYPE_CHECKING:
    from PIL import Image

    from triton_lifecycle.config import RequestLimits

FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded; Pillow knows more, some of them by way of other programs."""

_DATA_URL: Final = re.compile(r"data:[^,]{0,100};base64,", re.IGNORECASE)
_URL: Final = re.compile(r"(data:|[a-z][a-z0-9+.-]{0,20}://)", re.IGNORECASE)


def measure(images: Sequence[str], limits: RequestLimits) -> None:
    """Refuse what is too much before any of it is looked at.

    Raises:
        InvalidInput: too many images, or too many bytes in them together.

    """
    if len(images) > limits.max_images:
        raise InvalidInput(f"image: at most {limits.max_images} images are taken, found {len(images)}")
    total = sum(len(text) * 3 // 4 for text in images)
    if total > limits.max_image_bytes + 128 * len(images):  # what a data URL says first, and the padding
        raise InvalidInput(
            f"image: at most {limits.max_image_bytes} bytes are taken in all images together, found {total}"
        )


def decode(images: Sequence[str], limits: RequestLimits) -> tuple[Image.Image, ...]:
    """Return the pictures, as RGB. Blocks for as long as decoding takes: not for the event loop.

    Args:
        images: base64 texts; a data URL is fine.
        limits: ``max_image_pixels`` bounds all pictures together, before any of them is unpacked.

    Raises:
        InvalidInput: the message names the image by its index, and the rule.

    """
    left = limits.max_image_pixels
    pictures = []
    for index, text in enumerate(images):
        picture = _open(index, _bytes(index, text), limits.max_image_pixels)
        left -= picture.width * picture.height
        if left < 0:
            raise _too_large(index, limits.max_image_pixels, f"{picture.width} by {picture.height} here")
        pictures.append(_unpack(index, picture))
    return tuple(pictures)


def _bytes(index: int, text: str) -> bytes:
    if match := _DATA_URL.match(text):
        text = text[match.end() :]
    elif match := _URL.match(text):
        raise InvalidInput(
            f"image[{index}]: a URL that begins {match[0]!r}; nothing is fetched: send the image itself as base64"
        )
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"image[{index}]: not valid base64: {error}") from None
    if not data:
        raise InvalidInput(f"image[{index}]: empty")
    return data


def _open(index: int, data: bytes, most: int) -> Image.Image:
    """Read the header alone."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - it comes with vLLM, and few requests need it

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidInput(f"image[{index}]: not an image; {', '.join(FORMATS)} are taken") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(index, most, "far more here") from None
    except Exception as error:  # noqa: BLE001 - whatever a decoder stumbles over
        raise _broken(index, error) from None


def _unpack(index: int, picture: Image.Image) -> Image.Image:
    try:
        return picture.convert("RGB")
    except Exception as error:  # noqa: BLE001 - whatever a decoder stumbles over
        raise _broken(index, error) from None


def _broken(index: int, error: Exception) -> InvalidInput:
    return InvalidInput(f"image[{index}]: broken: {str(error)[:200] or type(error).__name__}")


def _too_large(index: int, most: int, found: str) -> InvalidInput:
    return InvalidInput(
        f"image[{index}]: at most {most} pixels are taken in all images together, and there are more ({found})"
    )
