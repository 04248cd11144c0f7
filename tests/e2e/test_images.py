"""Images, by the whole way: a real vision model (tiny, of random weights) under the real vLLM in the real server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.asking import WAYS, ask, joined, refusal
from tests.e2e.conftest import StartServer, until_idle
from tests.fakes.models import make_vision_model
from tests.unit.test_images import bomb, encoded
from triton_lifecycle.launcher.server import TritonServer
from triton_lifecycle_client import AsyncClient

QUESTION = "<image> What is this?"
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(start_server: StartServer, repository: Path, weights: Path) -> Iterator[TritonServer]:
    """Run the tiny vision model as a user of the official backend would have it."""
    version = repository / "seeing" / "1"
    make_vision_model(version / "model", weights)
    (version.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
    # In bfloat16 the answers of random weights tie.
    settings = {"model": "model", "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
    (version / "model.json").write_text(json.dumps(settings))
    running = start_server("seeing")
    yield running
    time.sleep(1.5)  # see compatibility.md: SIGTERM within a second of a closed HTTP stream
    assert running.stop() == 0, running.log()[-4000:]
    assert running.leftovers == []


def see(server: TritonServer, way: str, prompt: str, *images: str) -> str:
    """Return the answer's text, without the prompt."""
    asked = {"text_input": prompt, "image": [*images], "sampling_parameters": GREEDY}
    return joined(ask(server, way, model="seeing", exclude_input_in_output=True, **asked))


def noise(seed: int) -> str:
    """Return a JPEG of many colours."""
    file = io.BytesIO()
    Image.radial_gradient("L").rotate(seed).resize((300, 200)).convert("RGB").save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


RED, BLUE = encoded("red", (40, 40)), encoded("blue", (64, 32))


def test_the_answer_depends_on_the_image(server: TritonServer):
    """Other images, other answers; the same image the same answer, in all four ways and as a data URL."""
    right = {picture: see(server, "http", QUESTION, picture) for picture in (RED, BLUE, noise(0))}
    assert len(set(right.values())) == 3
    for way in WAYS:
        for picture, text in right.items():
            assert see(server, way, QUESTION, picture) == text
        assert see(server, way, QUESTION, f"data:image/png;base64,{RED}") == right[RED]


@pytest.mark.parametrize("way", WAYS)
def test_two_images_keep_their_order(server: TritonServer, way: str):
    """Each goes to its own place."""
    both = see(server, way, "<image> or <image>?", RED, BLUE)
    assert both == see(server, "http", "<image> or <image>?", RED, BLUE)
    assert both != see(server, way, "<image> or <image>?", BLUE, RED)


@pytest.mark.parametrize("way", WAYS)
def test_what_images_became_is_counted_as_prompt(server: TritonServer, way: str):
    """num_input_tokens is the length that the engine worked on, as in the official backend."""
    asked = {"text_input": QUESTION, "image": [RED], "sampling_parameters": GREEDY}
    responses = ask(server, way, model="seeing", return_num_input_tokens=True, return_finish_reason=True, **asked)
    assert {tuple(response["num_input_tokens"]) for response in responses} == {(11,)}, (
        "5 of text, 7 for the image less its place"
    )
    assert responses[-1]["finish_reason"] == ["length"]


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_may_hold_images(server: TritonServer, way: str):
    """As data URLs in its parts, or as places for the input ``image``; the template writes what stands for them."""
    words = {"type": "text", "text": "What is this?"}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}}
    inside = ask(
        server,
        way,
        model="seeing",
        sampling_parameters=GREEDY | {"messages": [{"role": "user", "content": [url, words]}]},
    )
    beside = ask(
        server,
        way,
        model="seeing",
        image=[RED],
        sampling_parameters=GREEDY | {"messages": [{"role": "user", "content": [{"type": "image"}, words]}]},
    )
    written = see(server, way, "user:<image>What is this?\nassistant:", RED)
    assert joined(inside) == joined(beside) == written


def test_text_alone_is_served_too(server: TritonServer):
    """A vision model without an image, as a prompt and as a conversation of plain texts."""
    prompt = see(server, "http", "user:Hello\nassistant:")
    talk = {"messages": [{"role": "user", "content": "Hello"}]}
    assert joined(ask(server, "http", model="seeing", sampling_parameters=GREEDY | talk)) == prompt


BAD = [
    (QUESTION, ["%%%"], "invalid_input: image[0]: not valid base64"),
    (QUESTION, [""], "invalid_input: image[0]: empty"),
    ("<image><image>", [RED, base64.b64encode(b"nothing to see").decode()], "invalid_input: image[1]: not an image"),
    (QUESTION, [base64.b64encode(base64.b64decode(noise(1))[:900]).decode()], "invalid_input: image[0]: broken"),
    (QUESTION, [bomb(60_000, 60_000)], "invalid_input: image[0]: at most 64000000 pixels"),
    (QUESTION, [bomb(9_000, 9_000)], "invalid_input: image[0]: at most 64000000 pixels"),
    ("<image>" * 17, [RED] * 17, "invalid_input: image: at most 16 images are taken, found 17"),
    (QUESTION, ["A" * 46_000_000], "invalid_input: image: at most 33554432 bytes are taken in all images together"),
    (
        "What is this?",
        [RED],
        "invalid_input: image: the prompt has 0 places for images, written '<image>', and 1 images",
    ),
    (QUESTION, [RED, BLUE], "invalid_input: image: the prompt has 1 places for images"),
    (QUESTION, [], "invalid_input: image: the prompt has 1 places for images, written '<image>', and 0 images"),
    ("<image>" + " the" * 252, [RED], "prompt_too_long: text_input: the prompt has 259 tokens, its images included"),
    (
        QUESTION,
        ["http://127.0.0.1:9/x.png"],
        "invalid_input: image[0]: a URL that begins 'http://'; nothing is fetched",
    ),
]


@pytest.mark.parametrize(("prompt", "images", "says"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_wrong_image_is_refused_and_hurts_nobody(server: TritonServer, prompt: str, images: list[str], says: str):
    """In all four ways a 4xx that names image and rule; the next request is answered as ever."""
    asked = {"image": images} if images else {}
    for way in WAYS:
        assert says in refusal(server, way, model="seeing", text_input=prompt, sampling_parameters=GREEDY, **asked)
    assert see(server, "http", QUESTION, RED) == see(server, "grpc", QUESTION, RED)


def test_nothing_is_left(server: TritonServer):
    """After all of this the engine knows no request and the counts add up."""

    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, model="seeing") as client:
            await until_idle(client)

    asyncio.run(scenario())
