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
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from triton_lifecycle.errors import InvalidInput, LifecycleError, Overloaded

START_LIMIT_S: Final = 60.0
MEMORY_BYTES: Final = 8 * 2**30
"""Of address space; importing torch takes half of it."""
KEPT: Final = 512
"""Specifications remembered as good."""


class GrammarTrial:
    """The process and what it found good. Thread-safe; started when it is first needed.

    Args:
        python: the interpreter.
        tokenizer: xgrammar's serialized ``TokenizerInfo``.

    """

    def __init__(self, python: str, tokenizer: str) -> None:
        self._python = python
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._good: OrderedDict[bytes, None] = OrderedDict()

    def check(self, kind: str, spec: str, limit: float) -> None:
        """Compile on trial. Blocks, at most for the limit of those before it and its own.

        Args:
            kind: ``json``, ``regex``, ``grammar``, ``lark`` or ``structural_tag``.
            spec: the text.
            limit: seconds.

        Raises:
            InvalidInput: it does not compile, or not within the limits.
            Overloaded: others are being checked, and the turn did not come in time.

        """
        key = hashlib.sha256(f"{kind}:{spec}".encode()).digest()
        if key in self._good:
            return
        if not self._lock.acquire(timeout=limit):
            raise Overloaded("structured_outputs: other schemas are being checked; try again", retry_after=limit)
        try:
            reply = self._ask({"kind": kind, "spec": spec}, limit)
        finally:
            self._lock.release()
        if reply is None:
            raise InvalidInput(
                f"structured_outputs.{kind}: compiling it takes more than {limit:g} s or {MEMORY_BYTES >> 30} GiB; "
                "make it simpler (nested repetition counts are the usual cause)"
            )
        if reply["error"]:
            raise InvalidInput(f"structured_outputs.{kind}: {reply['error']}")
        self._good[key] = None
        while len(self._good) > KEPT:
            self._good.popitem(last=False)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, question: dict[str, Any], limit: float) -> Any:  # noqa: ANN401 - the reply, None when there is none
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._start()
        return self._exchange(self._process, question, limit)

    def _start(self) -> subprocess.Popen[bytes]:
        package = Path(__file__).parents[2]
        environment = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        process = subprocess.Popen(
            [self._python, "-m", "triton_lifecycle.engine.grammar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        if self._exchange(process, {"tokenizer": self._tokenizer}, START_LIMIT_S) is None:
            process.kill()
            process.communicate()
            raise LifecycleError("structured_outputs: the process that checks schemas does not start on this server")
        return process

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], question: dict[str, Any], limit: float) -> Any:  # noqa: ANN401
        """Ask and wait; without a reply in time the process is killed."""
        if process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(limit) else b""
        if not line:
            process.kill()
            return None
        return json.loads(line)


def _serve() -> None:
    """Answer line by line, as the process that is started above."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import xgrammar

    compiler: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        error = ""
        if "tokenizer" in question:
            compiler = xgrammar.GrammarCompiler(
                xgrammar.TokenizerInfo.deserialize_json(question["tokenizer"]), max_threads=1, cache_enabled=False
            )
        else:
            try:
                _compile(compiler, question["kind"], question["spec"])
            except Exception as found:  # noqa: BLE001 - whatever it raises is the caller's fault to hear of
                error = " ".join(str(found).split())[:300] or type(found).__name__
        sys.stdout.write(json.dumps({"error": error}) + "\n")
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
            compiler.compile_structural_tag(spec)
        case _:
            compiler.compile_grammar(spec)


if __name__ == "__main__":
    _serve()
