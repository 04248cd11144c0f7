"""Schemas are compiled on trial in a process that is ended when they go too far, and replaced."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import xgrammar

from triton_lifecycle.engine.grammar import GrammarTrial, Verdict

SLOW = "|".join(f".{{0,{n}}}x.{{0,{n}}}" for n in range(1, 400))
"""xgrammar needs more than ten seconds for it."""
HUGE = (
    '{"type":"object","properties":{'
    + ",".join(f'"p{n}":{{"type":"string"}}' for n in range(3000))
    + '},"minProperties":1500,"maxProperties":1510}'
)
"""Gigabytes."""
OLD_TAG = '{"structures":[{"begin":"<a>","schema":{"type":"string"%s},"end":"</a>"}],"triggers":["<a>"]}'


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    """Return a trial with a vocabulary of bytes."""
    info = xgrammar.TokenizerInfo([chr(number) for number in range(32, 127)] + ["</s>"], stop_token_ids=[95])
    made = GrammarTrial(sys.executable, info.serialize_json)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "spec", "verdict"),
    [
        ("json", '{"type":"object","properties":{"city":{"type":"string"}}}', Verdict.GOOD),
        ("regex", "[a-z]{3}", Verdict.GOOD),
        ("grammar", 'root ::= "a" | "b"', Verdict.GOOD),
        ("structural_tag", OLD_TAG % "", Verdict.GOOD),
        ("json", "{", Verdict.REFUSED),
        ("regex", "([", Verdict.REFUSED),
        ("grammar", "root = ", Verdict.REFUSED),
        ("structural_tag", "{}", Verdict.REFUSED),
        ("regex", SLOW, Verdict.TOO_MUCH),
        ("structural_tag", OLD_TAG % f',"pattern":"{SLOW}"', Verdict.TOO_MUCH),
        ("json", HUGE, Verdict.TOO_MUCH),
    ],
)
def test_the_verdict(trial: GrammarTrial, kind: str, spec: str, verdict: Verdict):
    """Good, refused or too much; and the next one is judged by itself, whatever came before."""
    trial.check("regex", "warm", 5.0)
    began = time.monotonic()
    assert trial.check(kind, spec, 1.0) is verdict
    assert time.monotonic() - began < 10
    assert trial.check("regex", f"[ab]{{{len(spec) % 50 + 1}}}", 5.0) is Verdict.GOOD


def test_a_trial_that_is_killed_by_others_is_made_again(trial: GrammarTrial):
    """Its death alone does not speak against the text: it is tried once more, in a new process."""
    trial.check("regex", "warm", 5.0)
    process = trial._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert trial.check("regex", "[cd]{7}", 5.0) is Verdict.GOOD
    assert trial._process is not process
    os.kill(trial._process.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (trial._process.pid, signal.SIGKILL)).start()
    assert trial.check("regex", "[cd]{8}", 5.0) is Verdict.GOOD


def test_closing_ends_the_process(trial: GrammarTrial):
    """Nothing is left, and nothing is started any more."""
    info = xgrammar.TokenizerInfo(["a", "b", "</s>"], stop_token_ids=[2])
    own = GrammarTrial(sys.executable, info.serialize_json)
    own.check("regex", "a", 5.0)
    process = own._process
    assert process is not None
    own.close()
    assert process.wait(60) == -signal.SIGKILL
    with pytest.raises(Exception, match="stopping"):
        own.check("regex", "b", 5.0)
