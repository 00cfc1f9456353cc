"""Chat templates run within limits, in a process of their own."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import pytest

from ctx_compress_rag.text.rendering import render
from helpers.forked import run_python

CONTENT = "{{ messages[0].content }}"


def rendered(text: str, template: str = CONTENT) -> str:
    return render(template, [{"role": "user", "content": text}], {})


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'a' * 20000000000 }}",
        "{{ 'a' * 20000000 }}",
        "{{ messages[0].content | center(20000000000) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_much_is_stopped(template: str) -> None:
    with pytest.raises(RuntimeError, match="does not end|writes 20000003 characters"):
        rendered("Who", template + CONTENT)
    assert rendered("Who") == "Who"  # with the next, nothing is wrong


def test_chats_are_rendered_as_by_transformers(tiny_tokenizer: Any) -> None:
    chat = [{"role": role, "content": f"{role} \u3042 {{}} <b>"} for role in ("system", "user", "assistant", "user")]
    named = "{{ bos_token }}{{ eos_token }}{%- for m in messages %}\n{{ m | tojson }}{% break %}\n{% endfor %}"
    for template in (tiny_tokenizer.get_chat_template(), named):
        wanted = tiny_tokenizer.apply_chat_template(
            chat, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert render(template, chat, tiny_tokenizer.special_tokens_map) == wanted


def test_an_interrupted_chat_is_not_the_answer_to_the_next() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for tenths in range(1, 31):
            rendered("")
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, tenths / 10_000)
                while True:
                    rendered("first")
            assert rendered("second") == "second"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_forked_processes_get_answers_of_their_own() -> None:
    program = """
import os, threading
from ctx_compress_rag.text.rendering import render

def wrong(name):
    chats = [[{"role": "user", "content": f"{name} {i}"}] for i in range(300)]
    return sum(render("{{ messages[0].content }}", chat, {}) != chat[0]["content"] for chat in chats)

threads = [threading.Thread(target=wrong, args=("thread",)) for _ in range(3)]
for thread in threads:
    thread.start()
children = []
for name in "abc":
    child = os.fork()
    if not child:
        os._exit(bool(wrong(name)))
    children.append(child)
assert not wrong("parent")
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
