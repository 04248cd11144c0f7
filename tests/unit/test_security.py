"""Control requests and the token that a server may want for them."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes import pb_utils
from tests.unit.test_every_key import ask, serving, until
from triton_lifecycle import config
from triton_lifecycle.config import Config, Security, show
from triton_lifecycle.config.urls import Token
from triton_lifecycle.errors import Forbidden, from_wire
from triton_lifecycle_client import AsyncClient, codec
from triton_lifecycle_client.types import Chunk

SECRET = "a secret of the operators"


def control(manager, **parameters):
    """Return the document that answers, or the error."""
    request = pb_utils.InferenceRequest({"text_input": ""}, parameters)
    manager.submit([request])
    until(lambda: request.sender.finals)
    if request.sender.errors:
        return from_wire(request.sender.errors[0].message())
    return json.loads(request.sender.text())


def test_control_requests_need_the_token_where_one_is_set():
    """Without it, or with another, nobody is told or cancels anything; requests and readiness need none."""
    with serving(Config(security=Security(control_token=Token(SECRET)))) as manager:
        assert ask(manager, name="mine").sender.errors == []
        for token in ({}, {"control_token": "wrong"}, {"control_token": 1}, {"control_token": SECRET + "é"}):
            for verb in ("status", "cancel", "state", "nonsense"):
                refused = control(manager, control=verb, control_id="mine", **token)
                assert isinstance(refused, Forbidden)
                assert SECRET not in refused.message
        assert control(manager, control="ready") == {"ready": True}
        assert control(manager, control="status", control_id="mine", control_token=SECRET)["status"] == "finished"
        assert control(manager, control="state", control_token=SECRET)["live"] == 0


def test_without_a_token_everybody_may_ask():
    """The default keeps what was."""
    with serving(Config()) as manager:
        assert control(manager, control="state")["live"] == 0


def test_a_token_sent_with_a_request_is_no_sampling_parameter():
    """A caller that sends it always has its answer."""
    with serving(Config()) as manager:
        assert ask(manager, parameters={"control_token": SECRET}).sender.errors == []


def test_the_token_is_never_shown(tmp_path):
    """Neither the configuration's view nor a mistake in it, nor its text form, holds the secret."""
    loaded = config.read(None, {"LIFECYCLE_CONTROL_TOKEN": SECRET})
    assert loaded.config.security.control_token.reveal() == SECRET
    shown = (
        show.as_yaml(show.entries(loaded)) + repr(loaded.config) + str(loaded.config.model_dump()) + loaded.summary()
    )
    assert "control_token" in shown
    assert SECRET not in shown
    path = tmp_path / config.FILE_NAME
    path.write_text("request_lifecycle: {security: {control_token: short-secret}}")
    with pytest.raises(config.InvalidConfig, match="16 to 512") as caught:
        config.read(path, {})
    assert "short-secret" not in str(caught.value)


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_the_client_sends_its_token_with_control_requests_alone(given, monkeypatch):
    """It comes from the call or from the environment, and never travels with a prompt."""
    if given == "environment":
        monkeypatch.setenv("LIFECYCLE_CONTROL_TOKEN", SECRET)
    sent = []

    class Wire:
        async def exchange(self, request, limit_s):
            sent.append(codec.parameters(request))
            yield Chunk(("{}",), ("stop",), (1,), 1)

        async def close(self):
            pass

    async def scenario():
        async with AsyncClient("127.0.0.1:1", control_token=SECRET if given == "argument" else None) as client:
            client._transport = Wire()
            await client.generate("x")
            with pytest.raises(Exception, match="control request"):
                await client.cancel("r")

    asyncio.run(scenario())
    assert [found.get("control_token") for found in sent] == [None, SECRET]
