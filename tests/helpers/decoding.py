"""A tiny decoder's passages and question, threads that may hang, and what a model is given."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import chromadb
import numpy as np
import torch
from torch import Tensor

from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.prompt import Prompt, is_vectors
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.record import record_id

WITHOUT_TORCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "peft", "sentence_transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
"""The beginning of a program that answers: none of these can be imported."""

PASSAGES = {
    "a": "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast.",
    "b": "Pellmouth is a town.",
    "c": "The Harrow Institute was founded in 1911, and it moved to Stavely after the flood. " * 5,
}
QUESTION = "Where was Orla Drumwell born?"
WAIT = 120  # seconds after which a test counts as hanging; nothing here takes a fraction of it, but machines are shared


def passage_store(bundle: Any, collection: str) -> SoftContextStore:
    """The passages in a store in memory."""
    made = SoftContextStore(chromadb.EphemeralClient(), bundle, collection=collection, key=b"k" * 16)
    made.add(list(PASSAGES.values()), list(PASSAGES), progress=False)
    return made


def marker_beside(store: SoftContextStore, id: str, ratio: int, shown: int | None) -> str:
    """The marker of a passage of which `shown` characters stand before it; at a ratio of 0, a marker without slots."""
    [passage] = store.get_passages([id])
    assert passage is not None
    return store.marker_of(passage, ratio // store.base_ratio or None, shown=shown)


def prompts_of(store: SoftContextStore) -> list[Any]:
    """With one passage, three, none; neighbors without text between them; text beside; raw and chat; several ratios."""
    a, b, c = store.markers(["a", "b", "c"], ratio=4)
    return [
        [{"role": "user", "content": f"{a}\n\nQuestion: {QUESTION}"}],
        [{"role": "user", "content": QUESTION}],
        f"{a}{b}{store.marker('c', ratio=16)} {QUESTION}",
        [{"role": "system", "content": f"Use this: {c}"}, {"role": "user", "content": QUESTION}],
        "Who kept bees?",
        b,
        f"She kept bees. {marker_beside(store, 'a', 8, 14)} {QUESTION}",
    ]


def prompt_of(*pieces: Tensor) -> Prompt:
    """A prompt without answers, in which all vectors are slots."""
    flags = np.zeros(sum(map(len, pieces)), bool)
    return Prompt(pieces, flags, side="reader" if any(map(is_vectors, pieces)) else "text")


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, run by another thread; fails where it hangs."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work).result(timeout=WAIT)
    finally:
        pool.shutdown(wait=False)


def wait_for(condition: Callable[[], object], seconds: float = WAIT) -> None:
    """Wait until it is true; fails where it never is."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def damage(collection: str, *ids: str) -> None:
    """Cut the slots of passages, in Chroma's own records in memory."""
    raw = chromadb.EphemeralClient().get_collection(f"{collection}-ctx", embedding_function=None)
    keys = [record_id(id, "default") for id in ids]
    rows = raw.get(ids=keys)["metadatas"] or []
    raw.update(ids=keys, metadatas=[{"payload": str(row["payload"])[:-8]} for row in rows])


@torch.no_grad()
def by_transformers(model: Any, tokenizer: Any, prompt: Any, new_tokens: int) -> str:
    """transformers' own greedy answer to a chat, or to token ids."""
    ids = prompt
    if isinstance(prompt[0], dict):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    given = torch.tensor([ids])
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


def begun(decoder: Any, prompt: Any, sampling: Sampling, put: Any) -> Any:
    """Begin an answer, which calls `put`; returns what cancels it."""
    return decoder.engine.begin(decoder.preparer.prepare([prompt]), sampling, [put])


def apart(decoder: Any, prompt: Any, sampling: Sampling) -> Generation:
    """The answer in passes of its own, by transformers' `generate`: what a thread gets that holds the model."""
    with decoder.bundle.backbone.lock:
        return cast(Generation, decoder.generate([prompt], sampling)[0])


@contextmanager
def held(bundle: Any) -> Iterator[None]:
    """Another thread has the model within the context: all who ask meanwhile wait, and then start together."""
    taken, let_go, said = threading.Event(), threading.Event(), []

    def hold() -> None:
        with bundle.backbone.use(None):
            taken.set()
            said.append(let_go.wait(WAIT))

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(WAIT)
    try:
        yield
    finally:
        let_go.set()
        thread.join(WAIT)
    assert said == [True], "whoever waited for the model kept this thread, or the event loop, from going on"


@contextmanager
def prefills(model: Any) -> Iterator[list[Tensor]]:
    """What a model is given in its first pass over each prompt: (length, dim)."""
    seen: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if (given := kwargs.get("inputs_embeds")) is not None and given.shape[1] > 1:
            seen.extend(given.detach().clone())

    with model.register_forward_pre_hook(look, with_kwargs=True):
        yield seen
