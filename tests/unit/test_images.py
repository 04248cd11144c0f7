"""Images at the edge: what is taken, what is refused and with which words, on the way from base64 to pictures."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import zlib

import pytest
from PIL import Image

from tests.fakes import pb_utils
from tests.fakes.harness import Harness
from tests.unit.test_receive import read
from triton_lifecycle.chat import conversation
from triton_lifecycle.config import RequestLimits
from triton_lifecycle.errors import InvalidInput
from triton_lifecycle.images import FORMATS, decode, measure

LIMITS = RequestLimits()


def encoded(colour: str = "red", size: tuple[int, int] = (8, 6), kind: str = "PNG", mode: str = "RGB") -> str:
    """Return an image as base64."""
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def bomb(width: int, height: int) -> str:
    """Return a PNG of some dozen bytes that says it is this large."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in parts:
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", FORMATS)
def test_common_formats_are_decoded(kind: str):
    """To RGB, in their own size."""
    [picture] = decode([encoded("#ff0000", kind=kind)], LIMITS)
    assert (picture.mode, picture.size) == ("RGB", (8, 6))
    red, green, blue = picture.getpixel((3, 3))
    assert red > 250
    assert max(green, blue) < 5


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_other_modes_become_rgb(mode: str):
    """Grey, palettes, transparency and print colours."""
    kind = "TIFF" if mode == "CMYK" else "PNG"
    [picture] = decode([encoded(0 if mode in {"L", "1", "P"} else "black", kind=kind, mode=mode)], LIMITS)
    assert picture.mode == "RGB"


def test_a_data_url_and_broken_lines_are_fine():
    """As browsers and mail write base64."""
    text = encoded()
    lines = "\n".join(text[i : i + 20] for i in range(0, len(text), 20))
    for given in (f"data:image/png;base64,{text}", f"data:image/png;name=x.png;base64,{text}", lines):
        assert decode([given], LIMITS)[0].size == (8, 6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "image[1]: empty"),
        ("%%%", "image[1]: not valid base64"),
        ("abcde", "image[1]: not valid base64"),
        ("é" * 8, "image[1]: not valid base64"),
        (base64.b64encode(b"no image at all").decode(), "image[1]: not an image; BMP, GIF, JPEG,"),
        (base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n").decode(), "image[1]: not an image"),
        (base64.b64encode(base64.b64decode(encoded(size=(60, 60)))[:60]).decode(), "image[1]: broken: "),
        (base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 40).decode(), "image[1]: "),
        ("http://127.0.0.1/x.png", "image[1]: a URL that begins 'http://'; nothing is fetched"),
        ("file:///etc/passwd", "image[1]: a URL that begins 'file://'; nothing is fetched"),
        ("data:image/png,abc", "image[1]: a URL that begins 'data:'; nothing is fetched"),
        (bomb(30_000, 30_000), "image[1]: at most 64000000 pixels are taken"),
        (
            bomb(8_001, 8_000),
            "at most 64000000 pixels are taken in all images together, and there are more (8001 by 8000",
        ),
        (bomb(10_000, 10_000), "image[1]: at most 64000000 pixels are taken"),
        (bomb(0, 5), "image[1]: "),
    ],
)
def test_what_is_no_image_is_named(text: str, says: str):
    """By its index and the rule; what is huge is refused before it is unpacked."""
    with pytest.raises(InvalidInput) as caught:
        decode([encoded(), text], LIMITS)
    assert says in caught.value.message
    assert len(caught.value.message) < 400


def test_pixels_count_together():
    """Two that are fine alone may be too large together."""
    limits = RequestLimits(max_image_pixels=100)
    decode([encoded(size=(8, 8))], limits)
    with pytest.raises(InvalidInput, match=r"image\[1\]: at most 100 pixels"):
        decode([encoded(size=(8, 8)), encoded(size=(8, 8))], limits)


def test_number_and_bytes_are_measured_first():
    """Before any of it is decoded."""
    with pytest.raises(InvalidInput, match="image: at most 16 images are taken, found 17"):
        measure(["x"] * 17, LIMITS)
    with pytest.raises(InvalidInput, match="image: at most 1000 bytes are taken in all images together, found 1500"):
        measure(["x" * 1000] * 2, RequestLimits(max_image_bytes=1000))
    measure([encoded()] * 16, LIMITS)


def test_images_come_as_an_input_or_within_messages():
    """As data URLs in the parts of a conversation, or as parts that point at the input."""
    picture = encoded()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}", "detail": "low"}}
    words = {"type": "text", "text": "what is it?"}
    assert read({"text_input": "x", "image": [picture, picture]}).images == (picture, picture)
    found = read({"sampling_parameters": json.dumps({"messages": [{"role": "user", "content": [url, words]}]})})
    assert found.images == (f"data:image/png;base64,{picture}",)
    assert found.source.messages == [{"role": "user", "content": [{"type": "image"}, words]}]
    messages = json.dumps([{"role": "user", "content": [words, {"type": "image"}]}])
    assert read({"image": [picture]}, {"messages": messages}).images == (picture,)


@pytest.mark.parametrize(
    ("tensors", "messages", "says"),
    [
        ({"image": ["x"], "embedding_request": '{"input": "x"}'}, None, "not with embedding_request"),
        ({"image": ["x"]}, [{"type": "image_url", "image_url": {"url": "data:;base64,eA=="}}], "give them once"),
        ({"image": ["x"]}, [{"type": "text", "text": "x"}], "the messages have 0 parts of type image, and 1 images"),
        ({}, [{"type": "image"}], "the messages have 1 parts of type image, and 0 images"),
        ({}, [{"type": "image_url", "image_url": {}}], "messages[0].content[0].image_url: object missing"),
        ({}, [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}], "not both"),
    ],
)
def test_images_that_fit_nowhere_are_refused(tensors: dict, messages: list | None, says: str):
    """One image, one place."""
    parameters = {} if messages is None else {"messages": json.dumps([{"role": "user", "content": messages}])}
    with pytest.raises(InvalidInput) as caught:
        read(tensors, parameters)
    assert says in caught.value.message


def test_text_parts_alone_stay_one_text():
    """Whether in parts or not."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation([{"role": "user", "content": parts}], None).messages[0]["content"] == "ab"
    assert conversation([{"role": "user", "content": []}], None).messages[0]["content"] == ""


def test_a_text_model_says_what_it_takes():
    """Unsupported, before anything is decoded."""

    async def scenario() -> None:
        harness = Harness()
        request = pb_utils.InferenceRequest({"text_input": "x", "image": ["broken"]})
        await harness.serve(request)
        [error] = request.sender.errors
        assert error.code() == pb_utils.TritonError.UNSUPPORTED
        assert error.message() == (
            "unsupported: image: the loaded model takes no images; it takes text_input or messages"
        )

    asyncio.run(scenario())
