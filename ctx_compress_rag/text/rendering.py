"""Chat templates are strangers' programs: they run in a process of their own, with limits on time and memory.

transformers' sandbox keeps them from files and from Python's inside, but not from loops without end, texts that double
or `10 ** (10 ** 9)`, and nothing in the same process can stop a single operation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_SECONDS = 2  # of a processor's time; a chat takes less than a thousandth
_BYTES = 2**30
_CHARACTERS = 1_000_000  # more than twice the template and the chat


class _Renderer:
    """The process that renders chats, started by the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def answer(self, question: str) -> str:
        """The line that answers a line, or "" if the process came to its limits."""
        with self._lock:
            process, self._process = self._process or _started(), None
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(f"{question}\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # such as Ctrl-C: its late answer must not be taken for the next
                process.kill()
                process.wait()
                raise
            if line:
                self._process = process
            else:
                process.wait()
            return line


def _started() -> subprocess.Popen[str]:
    # numpy, which transformers imports, would reserve memory for each of its threads.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | environment,
        start_new_session=True,  # Ctrl-C is for this process
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        raise RuntimeError(f"cannot be rendered: {sys.executable} does not run {__file__}")
    return process


# A forked process starts its own, and keeps the others: to close their pipes could wait for threads it does not have.
_renderers = [_Renderer()]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _renderers.append(_Renderer()))


def render(template: str, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str:
    """Render a chat, with the cue for an answer.

    Args:
        template: a jinja template for transformers.
        messages: the chat.
        tokens: the tokenizer's special tokens by name.

    Raises:
        RuntimeError: the template fails, or takes too much time or memory.
    """
    line = _renderers[-1].answer(json.dumps([template, [dict(message) for message in messages], dict(tokens)]))
    if not line:
        raise RuntimeError(f"it does not end within {_SECONDS} s and {_BYTES >> 30} GiB: fix its loops")
    text, error = json.loads(line)
    if error is not None:
        raise RuntimeError(error)
    return str(text)


def _main() -> None:
    """Answer each line of the standard input: a template, messages and tokens as JSON."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_AS", _BYTES)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stdout.write("\n")  # ready
    for line in sys.stdin:
        _limit("RLIMIT_CPU", int(time.process_time()) + 1 + _SECONDS)
        template, messages, tokens = json.loads(line)
        try:
            made: Any = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **tokens)
            text, error = made[0][0], None
        except MemoryError:
            return
        except Exception as raised:  # a template is a program: it may raise anything
            text, error = "", str(raised)[:1000]
        if len(text) > 2 * len(line) + _CHARACTERS:
            text, error = "", f"it writes {len(text)} characters: fix its loops"
        sys.stdout.write(json.dumps([text, error]) + "\n")


def _limit(name: str, most: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    kind = getattr(resource, name)
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    _main()
