"""Images through the engine seam, on both engines: a tiny vision model of random weights, and what is simulated."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from tests.contract.subjects import MAX_MODEL_LEN, WEIGHTS, Real, Simulated, Subject, eventually
from tests.contract.test_engine_contract import GREEDY, _ids, join
from tests.fakes.models import IMAGE_TOKENS, make_vision_model

from triton_lifecycle.engine import Chunk, Engine, EngineRequest
from triton_lifecycle.errors import InvalidInput, PromptTooLong, Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

RED, BLUE = (Image.new("RGB", (40, 40), colour) for colour in ("red", "blue"))
QUESTION = "<image> What is this?"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """Load the tiny vision model, whose answers are clear in float32."""
    model = make_vision_model(tmp_path_factory.mktemp("vision") / "model", WEIGHTS)
    subject = Real(model, dtype="float32")
    yield subject
    subject.close()


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.real_engine)])
def subject(request: pytest.FixtureRequest) -> Subject:
    """An engine that takes images."""
    if request.param == "simulated":
        return Simulated(image_tokens=IMAGE_TOKENS)
    return request.getfixturevalue("seeing")


async def ask(engine: Engine, prompt: str, *images: Image.Image, **values: object) -> AsyncGenerator[Chunk, None]:
    """Start a request about images."""
    ids = await engine.tokenize(prompt, images=len(images))
    sampling = engine.sampling(GREEDY | values)
    if sampling.structured:
        await engine.prove(sampling, 10.0)
    return engine.generate(EngineRequest(f"images-{next(_ids)}", ids, sampling, images=images))


async def answer(engine: Engine, prompt: str, *images: Image.Image) -> tuple[int, ...]:
    """Return the answer's tokens."""
    return join([chunk async for chunk in await ask(engine, prompt, *images)]).token_ids


def test_the_answer_depends_on_the_images(subject: Subject):
    """The same image gives the same answer, another one another; their order counts."""

    async def body(engine: Engine) -> None:
        assert engine.limits.images >= 16
        red, blue = await answer(engine, QUESTION, RED), await answer(engine, QUESTION, BLUE)
        assert red != blue
        assert await answer(engine, QUESTION, RED.copy()) == red
        both = await answer(engine, "<image><image> And now?", RED, BLUE)
        assert both != await answer(engine, "<image><image> And now?", BLUE, RED)

    subject.run(body)


def test_images_count_as_prompt(subject: Subject):
    """The engine says how long the prompt became; one that became too long is refused with both numbers."""

    async def body(engine: Engine) -> None:
        ids = await engine.tokenize("<image>" * 3 + "x", images=3)
        places = 3 if isinstance(subject, Real) else 0
        [first, *_] = [chunk async for chunk in await ask(engine, "<image>" * 3 + "x", RED, RED, BLUE)]
        # Neighbours share the mark between them in some models.
        assert len(ids) - places + 3 * (IMAGE_TOKENS - 2) < (first.prompt_tokens or 0)
        assert (first.prompt_tokens or 0) <= len(ids) - places + 3 * IMAGE_TOKENS
        with pytest.raises(PromptTooLong, match=rf"{MAX_MODEL_LEN}"):
            await anext(await ask(engine, "<image>" + " the" * (MAX_MODEL_LEN - 4), RED))

    subject.run(body)


def test_a_request_with_images_may_be_left(subject: Subject):
    """Before its first token and after it; nothing stays behind."""

    async def body(engine: Engine) -> None:
        stream = await ask(engine, QUESTION, RED, max_tokens=180)
        await anext(stream)
        await stream.aclose()
        early = asyncio.ensure_future(anext(await ask(engine, QUESTION, BLUE, max_tokens=180)))
        await asyncio.sleep(0)
        early.cancel()
        await eventually(lambda: engine.load().requests == 0)
        assert await answer(engine, QUESTION, RED)

    subject.run(body)


def test_conversations_have_places_for_images(subject: Subject):
    """Written by the template, in their order."""

    async def body(engine: Engine) -> None:
        parts = [{"type": "text", "text": "What is"}, {"type": "image"}, {"type": "text", "text": "this?"}]
        text = await engine.render([{"role": "system", "content": "Look."}, {"role": "user", "content": parts}], None)
        assert "Look." in text
        if isinstance(subject, Real):
            assert "What is<image>this?" in text
        assert await answer(engine, text, RED) != await answer(engine, text, BLUE)

    subject.run(body)


def test_a_simulated_model_may_be_without_eyes():
    """The default."""

    async def body(engine: Engine) -> None:
        assert engine.limits.images == 0
        with pytest.raises(Unsupported, match="image"):
            await anext(await ask(engine, "x", RED))

    Simulated().run(body)


@pytest.mark.real_engine
@pytest.mark.parametrize(
    ("prompt", "images"), [("What is this?", 1), (QUESTION, 2), ("<image>" + QUESTION, 1), (QUESTION, 0)]
)
def test_each_image_needs_one_place(seeing: Real, prompt: str, images: int):
    """A prompt with too few or too many is refused; the engine goes on."""

    async def body(engine: Engine) -> None:
        with pytest.raises(
            InvalidInput, match=rf"image: the prompt has \d places for images, .*{images} images are given"
        ):
            await answer(engine, prompt, *[RED] * images)
        assert await answer(engine, QUESTION, RED)

    seeing.run(body)


@pytest.mark.real_engine
def test_what_vllm_refuses_is_the_callers_fault(seeing: Real):
    """Also where our own count is not asked: token ids without a place, and a picture that no processor takes."""

    async def body(engine: Engine) -> None:
        for ids, image in (([5, 6, 7], RED), ((await engine.tokenize(QUESTION, images=1)), object())):
            request = EngineRequest(f"images-{next(_ids)}", ids, engine.sampling(GREEDY), images=(image,))
            with pytest.raises(InvalidInput, match="image: the loaded model's processor refuses") as caught:
                await anext(engine.generate(request))
            assert len(caught.value.message) < 300
        assert await answer(engine, QUESTION, RED)

    seeing.run(body)


@pytest.mark.real_engine
def test_what_is_said_of_an_image_may_be_bound(seeing: Real):
    """A schema beside an image; the same text again when it is already known."""

    async def body(engine: Engine) -> None:
        for _ in range(2):
            stream = await ask(engine, QUESTION, RED, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
            got = join([chunk async for chunk in stream])
            assert (got.text in {"yes", "no"}, got.finish_reason) == (True, "stop")

    seeing.run(body)


@pytest.mark.real_engine
@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (3000, 2000)])
def test_any_size_is_served(seeing: Real, size: tuple[int, int]):
    """However small or thin."""

    async def body(engine: Engine) -> None:
        assert len(await answer(engine, QUESTION, Image.new("RGB", size, "green"))) == GREEDY["max_tokens"]

    seeing.run(body)
