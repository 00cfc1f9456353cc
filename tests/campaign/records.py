"""Fields of records changed at random behind the store's back; then everything is read in every way.

Left alone are `full_hash` and what Chroma itself keeps: a record's seals do not cover them.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import chromadb

from campaign import part
from campaign.folders import KEY, is_of, text_of
from ctx_compress_rag.errors import CtxCompressError
from ctx_compress_rag.store import SoftContextStore
from helpers.store import WordBundle

COUNTED = ["changed records", "reads", "refused with the library's own error", "read as before"]
FAULTS = ["read wrong", "raw errors"]
FIELDS = (
    "payload",
    "payload_hash",
    "text",
    "text_hash",
    "marker",
    "slots",
    "tokens",
    "metadata",
    "metadata_seal",
    "seal",
)
PASSAGES = 20


def changed(value: Any, other: Any, rng: random.Random) -> Any:
    """Another value for a field."""
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, 0, -1, 2**31, str(value), float(value), True, other])
    at = rng.randrange(len(value))
    letter = rng.choice("abcdefABCDEF0123456789+/=\x00é")
    return rng.choice(
        [
            value[:at] + letter + value[at + 1 :],
            value[:at],
            value[:at] + letter + value[at:],
            other,
            "",
            len(value),
            value.swapcase(),
            value * 2,
        ]
    )


def run(seconds: float, seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    more, rng, bundle = part.Deadline(seconds), random.Random(seed), WordBundle()
    client = chromadb.EphemeralClient()
    store = SoftContextStore(client, bundle, key=KEY)
    texts = {f"p{n}": text_of(n) for n in range(PASSAGES)}
    store.add(list(texts.values()), list(texts), progress=False)
    markers = dict(zip(texts, (store.split(m)[0] for m in store.markers(list(texts), 4)), strict=True))
    raw = client.get_collection("passages-ctx", embedding_function=None)
    rows: dict[str, Any] = {id: raw.get(ids=[id])["metadatas"][0] for id in texts}
    reads: dict[str, Any] = {
        "get": lambda id: [soft is None or is_of(soft.merge(2), bundle, texts[id]) for soft in store.get([id])],
        "fetch": lambda id: [is_of(soft.merge(2), bundle, texts[id]) for soft in store.fetch([markers[id]])],
        "text": lambda id: [text == texts[id] for text in store.text_of([markers[id]])],
        "passage": lambda id: [p is None or (p.id, p.text) == (id, texts[id]) for p in store.get_passages([id])],
    }
    while more:
        id, other = rng.sample(list(texts), 2)
        fields = rng.sample(FIELDS, rng.choice([1, 1, 2, len(FIELDS)]))
        new = {name: changed(rows[id][name], rows[other][name], rng) for name in fields}
        if all(type(new[name]) is type(rows[id][name]) and new[name] == rows[id][name] for name in fields):
            continue
        raw.update(ids=[id], metadatas=[rows[id] | new])
        found["changed records"] += 1
        for read in reads.values():
            found["reads"] += 1
            try:
                good = all(read(id))
                found["read as before" if good else "read wrong"] += 1
            except CtxCompressError:
                found["refused with the library's own error"] += 1
            except Exception as error:
                print("raw error:", fields, repr(error)[:300])
                found["raw errors"] += 1
        raw.update(ids=[id], metadatas=[rows[id]])
    assert store.discard_damaged() == []
    return found


if __name__ == "__main__":
    part.main(run, COUNTED, FAULTS)
