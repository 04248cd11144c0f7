"""How vLLM's models take images: how many, what stands for one in a prompt, and how pictures join the tokens.

Next to ``vllm.py`` the only module that knows vLLM's names for this.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from triton_lifecycle.errors import GenerationFailed, InvalidInput, Unsupported

PROBE: Final = "probe-of-a-template"


class Vision:
    """What the loaded model does with images; one that takes none has ``most`` = 0.

    Args:
        llm: the running ``AsyncLLM``.
        tokenizer: one that may be used here, at start only.

    """

    def __init__(self, llm: Any, tokenizer: Any) -> None:  # noqa: ANN401 - vLLM is not typed for us
        self.most = 0
        self.place_id: int | None = None
        """The token that stands for an image in a prompt; ``None`` where the model has no such token."""
        self.template: Any = getattr(tokenizer, "chat_template", None)
        self._llm = llm
        self._model: Any = None
        processor = getattr(getattr(llm, "renderer", None), "mm_processor", None)
        if processor is not None:
            self._learn(llm, processor, tokenizer)
        self._takes_texts, self._takes_parts = (
            _writes(tokenizer, self.template, content) for content in (PROBE, [{"type": "text", "text": PROBE}])
        )

    def _learn(self, llm: Any, processor: Any, tokenizer: Any) -> None:  # noqa: ANN401
        from vllm.model_executor.model_loader import get_model_cls

        self.most = int(processor.info.allowed_mm_limits.get("image", 0))
        self._model = get_model_cls(llm.model_config)
        if self.template is None:
            # Some models keep it with what prepares their images.
            self.template = getattr(processor.info.get_hf_processor(), "chat_template", None)
        config = llm.model_config.hf_config
        token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
        place = self._place(1)
        if token is not None and place and tokenizer.encode(place, add_special_tokens=False).count(token) == 1:
            self.place_id = token

    def check(self, token_ids: list[int], images: int) -> None:
        """Refuse a prompt that has not one place for each image.

        vLLM would raise for too few; too many stay in the prompt, and some models' code does not survive that.
        """
        if self.place_id is None:
            return
        found = token_ids.count(self.place_id)
        if found != images:
            raise InvalidInput(
                f"image: the prompt has {found} places for images, written {self._place(1)!r}, "
                f"and {images} images are given; each needs one"
            )

    async def join(self, prompt: Any, images: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """Return vLLM's rendered input for a token prompt and its images; runs in vLLM's own thread for that.

        Raises:
            InvalidInput: the model's processor cannot work with these images or this prompt.

        """
        try:
            [joined] = await self._llm.renderer.render_cmpl_async(
                [{**prompt, "multi_modal_data": {"image": [*images]}}]
            )
        except (AssertionError, ValueError, TypeError) as error:
            # vLLM's own text may hold the whole prompt and the pixels.
            cause = error.__cause__ or error
            raise InvalidInput(f"image: the loaded model's processor refuses: {str(cause)[:200]}") from None
        except Exception as error:
            raise GenerationFailed(
                f"vLLM failed on these images: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        return joined

    def shape(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give messages the form that the chat template reads: texts, or lists of parts.

        Raises:
            Unsupported: they hold images, and neither the template nor the model has a place for one.

        """
        number = 0
        shaped = []
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                # A template that reads parts alone would drop a text without a word.
                parts_only = self._takes_parts and not self._takes_texts
                written: Any = [{"type": "text", "text": content}] if parts_only else content
            elif self._takes_parts:
                written = content
            else:
                texts = []
                for part in content:
                    number += part["type"] == "image"
                    texts.append(part["text"] if part["type"] == "text" else self._written(number))
                written = "".join(texts)
            shaped.append({**message, "content": written})
        return shaped

    def _written(self, number: int) -> str:
        place = self._place(number)
        if place is None:
            raise Unsupported(
                "messages: the model's chat template has no place for an image; send text_input and image"
            )
        return place

    def _place(self, number: int) -> str | None:
        """Return what stands for the image of that number in a prompt, if anything does."""
        place: str | None = None
        with suppress(Exception):  # a model that has none says so in ways of its own
            place = self._model.get_placeholder_str("image", number)
        return place


def _writes(tokenizer: Any, template: Any, content: Any) -> bool:  # noqa: ANN401
    """Whether the template writes such a content's text out, and not the content's own notation."""
    messages = [{"role": "user", "content": content}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # noqa: BLE001 - a template may fail in any way
        return False
    return PROBE in text and "'type'" not in text
