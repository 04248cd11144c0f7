"""Compiling a caller's schema, expression or grammar once on trial, in a process that can be ended.

xgrammar takes milliseconds for what people write, but minutes and gigabytes for a text of thirty characters such as
``((ab|cd){0,1000}){0,1000}``, and cannot be interrupted. vLLM compiles in its engine's process, where that would hurt
everybody. So what binds a text goes through this process first: it is limited in time and memory, and is killed and
replaced when it goes beyond.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Final

from triton_lifecycle.errors import Draining, LifecycleError

START_LIMIT_S: Final = 60.0
MEMORY_BYTES: Final = 2**30
"""Of address space, beyond what the process has when it is ready."""
KEPT: Final = 512
"""Specifications remembered as good."""


class Verdict(Enum):
    """What a trial showed."""

    GOOD = "good"
    REFUSED = "refused"
    """xgrammar does not take it; another library of vLLM's may."""
    TOO_MUCH = "too much"
    """It goes beyond the limits of time or memory."""


class GrammarTrial:
    """The process and what it found good; started when it is first needed. One check at a time.

    Args:
        python: the interpreter.
        tokenizer: gives xgrammar's serialized ``TokenizerInfo``.

    """

    def __init__(self, python: str, tokenizer: Callable[[], str]) -> None:
        self._python = python
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._turn = threading.Lock()
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def check(self, kind: str, spec: str, limit: float) -> Verdict:
        """Compile on trial. Blocks for at most ``limit`` seconds, and for the process's start.

        Args:
            kind: ``json``, ``regex``, ``grammar``, ``lark`` or ``structural_tag``.
            spec: the text.
            limit: seconds.

        """
        key = hashlib.sha256(f"{kind}:{spec}".encode()).digest()
        if key in self._good:
            return Verdict.GOOD
        with self._turn:
            verdict = self._ask(kind, spec, limit)
        if verdict is Verdict.GOOD:
            self._good[key] = None
            while len(self._good) > KEPT:
                self._good.popitem(last=False)
        return verdict

    def close(self) -> None:
        """End the process for good; a check under way ends too (it is waited for, at most 5 s)."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        if self._turn.acquire(timeout=5):
            self._end()
            self._turn.release()

    def _ask(self, kind: str, spec: str, limit: float) -> Verdict:
        deadline = time.monotonic() + limit
        for _ in range(2):
            if self._process is None:
                self._process = self._start()
                deadline = time.monotonic() + limit
            try:
                reply = self._exchange(self._process, {"kind": kind, "spec": spec}, deadline - time.monotonic())
            except TimeoutError:
                self._end()
                return Verdict.TOO_MUCH
            if reply is not None and reply.get("too_much"):
                self._end()
                return Verdict.TOO_MUCH
            if reply is not None:
                return Verdict.REFUSED if reply["error"] else Verdict.GOOD
            # It died over this: of this text, which then kills the next one too, or of something else.
            self._end()
        return Verdict.TOO_MUCH

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise Draining("the engine is stopping")
        package = Path(__file__).parents[2]
        environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        process = subprocess.Popen(
            [self._python, "-m", "triton_lifecycle.engine.grammar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            ready = self._exchange(process, {"tokenizer": self._tokenizer()}, START_LIMIT_S)
        except TimeoutError:
            ready = None
        if ready is None:
            _reap(process)
            raise LifecycleError("structured_outputs: the process that tries schemas does not start on this server")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _reap(process)

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], question: dict[str, Any], limit: float) -> Any:  # noqa: ANN401
        """Ask and wait; ``None`` when the process is gone; raises ``TimeoutError`` when it takes too long."""
        if process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, limit)):
                raise TimeoutError
        line = process.stdout.readline()
        return json.loads(line) if line else None


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _serve() -> None:
    """Answer line by line, as the process that is started above."""
    import resource

    import xgrammar

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        reply: dict[str, Any] = {"error": ""}
        if "tokenizer" in question:
            compiler = xgrammar.GrammarCompiler(
                xgrammar.TokenizerInfo.deserialize_json(question["tokenizer"]), max_threads=1, cache_enabled=False
            )
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            most = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        else:
            try:
                _compile(compiler, question["kind"], question["spec"])
            except Exception as found:  # noqa: BLE001 - whatever it raises is the caller's fault to hear of
                reply["error"] = " ".join(str(found).split())[:300] or type(found).__name__
                reply["too_much"] = isinstance(found, MemoryError) or "bad_alloc" in str(found)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _compile(compiler: Any, kind: str, spec: str) -> None:  # noqa: ANN401 - xgrammar is not typed for us
    match kind:
        case "json":
            compiler.compile_json_schema(spec)
        case "regex":
            compiler.compile_regex(spec)
        case "lark":
            compiler.compile_lark(spec)
        case "structural_tag":
            tag = json.loads(spec)
            if "structures" in tag:
                # The older form, which vLLM compiles in this way.
                import xgrammar

                items = [
                    xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
                    for one in tag["structures"]
                ]
                compiler.compile_structural_tag(items, tag["triggers"])
            else:
                compiler.compile_structural_tag(spec)
        case _:
            compiler.compile_grammar(spec)


if __name__ == "__main__":
    _serve()
