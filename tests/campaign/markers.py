"""Markers that were not issued to the reader, in every field of both frameworks, before the demo bundle's decoder.

One prompt in five holds a good marker beside the attack: what the decoder reads as slots must be that one's alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import chromadb
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.messages import ChatMessage as RoleMessage
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from benchmarks.world.world import World
from campaign import part
from ctx_compress_rag import Bundle, SoftContextStore
from ctx_compress_rag.errors import CtxCompressError, MissingPassageError
from langchain_ctx_compress import ChatCompressedContext
from langchain_ctx_compress import CompressedContextPostprocessor as LangChainPostprocessor
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as LlamaIndexPostprocessor

MOST = 10_000
KINDS = ("forged", "tampered", "spliced", "cut", "nested", "re-formed", "other scope", "other store", "replayed")
OWN_SHARE = 0.2
EXPANDED = ("document", "node text")  # a good marker in a passage's own text becomes its text there
LETTERS = "abcdefghijklmnop"
READER, OTHER = "anna", "ben"
COUNTED = [
    *(f"attacks: {kind}" for kind in KINDS),
    "fields of LangChain that they stood in",
    "fields of LlamaIndex that they stood in",
    "read as literal text",
    "refused with the library's own error",
    "good markers beside them, read",
]
FAULTS = ["attacks that became slots", "good markers beside them, not read", "raw errors"]


class Attacks:
    """Stores with the same bundle, passages and ids, and what can be made of their markers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        bundle = Bundle.from_pretrained("demo")
        texts = [entity.passage for entity in World("test", 0).entities]
        ids = [f"p{n}" for n in range(len(texts))]
        client = chromadb.EphemeralClient()
        self.store = SoftContextStore(client, bundle, collection="mine", key=b"the key of this one", scope=READER)
        other = SoftContextStore(client, bundle, collection="other", key=b"the key of the other", scope=READER)
        for store in (self.store, other):
            store.add(texts, ids, progress=False)
        self.own = self.store.markers(ids[1:], 16)
        self.slots = {marker: int(marker.split(".")[1]) for marker in self.own}
        self.store.add(texts, ids, progress=False, scope=OTHER)
        self.of = {
            "other scope": self.store.markers(ids, 16, OTHER),
            "other store": other.markers(ids, 16),
            "replayed": [self.store.marker("p0", 16)],
        }
        self.store.delete(["p0"])

    def make(self, kind: str) -> str:
        rng = self.rng
        first, second = rng.sample(self.own, 2)
        (head, slots, tag), other = first.split("."), second.split(".")
        at = rng.randrange(1, len(first) - 1)
        forged = f"[[ctx:{''.join(rng.choices(LETTERS, k=20))}.{slots}.{''.join(rng.choices(LETTERS, k=16))}]]"
        match kind:
            case "forged":
                return forged
            case "tampered":
                place = rng.choice([i for i in range(6, len(first) - 2) if first[i] != "."])
                return (
                    first[:place]
                    + rng.choice([c for c in LETTERS + "0123456789" if c != first[place]])
                    + first[place + 1 :]
                )
            case "spliced":
                mixes = [[head, other[1], tag], [head, slots, other[2]], [other[0], slots, tag]]
                return ".".join(rng.choice([mix for mix in mixes if ".".join(mix) not in self.slots]))
            case "cut":
                return rng.choice([first[:at], first[at:]])
            case "nested":
                return first[:at] + self.of["other store"][0] + first[at:]
            case "re-formed":
                return first[:at] + rng.choice([forged, "[[ctx:]]", "​"]) + first[at:]
        return rng.choice(self.of[kind])


Read = Callable[[str], int]
"""Sends a text in one field; how many slots the decoder read."""


def langchain_fields(store: SoftContextStore) -> dict[str, Read]:
    llm = ChatCompressedContext(store=store, max_tokens=1)
    shown = LangChainPostprocessor(store=store, on_missing="text")
    asked = HumanMessage("Who is it?")
    template = ChatPromptTemplate([("system", "{context}"), ("placeholder", "{history}"), ("human", "{input}")])

    def slots(messages: Any) -> int:
        return int(llm.invoke(messages).response_metadata["slots"])

    def formatted(context: str = "", history: Any = (), question: str = "Who?") -> int:
        return slots(template.invoke({"context": f"Read: {context}", "history": list(history), "input": question}))

    return {
        "system message": lambda text: slots([SystemMessage(f"Be brief. {text}"), asked]),
        "human message": lambda text: slots([HumanMessage(text)]),
        "ai message": lambda text: slots([asked, AIMessage(f"It is {text}."), asked]),
        "tool message": lambda text: slots([asked, RoleMessage(role="tool", content=text), asked]),
        "text blocks": lambda text: slots(
            [HumanMessage([{"type": "text", "text": text}, {"type": "text", "text": "?"}])]
        ),
        "history": lambda text: formatted(history=[HumanMessage(text), AIMessage("I see.")]),
        "question": lambda text: formatted(question=f"{text} Who?"),
        "document": lambda text: formatted(
            shown.invoke([Document(id="x", page_content=f"See {text}.")])[0].page_content
        ),
        "document metadata": lambda text: formatted(Document(page_content="a", metadata={"s": text}).metadata["s"]),
        "prompt": lambda text: int(llm.invoke(text).response_metadata["slots"]),
    }


def llama_index_fields(store: SoftContextStore) -> dict[str, Read]:
    llm = CompressedContextLLM(store=store, max_tokens=1)
    shown = LlamaIndexPostprocessor(store, on_missing="text")
    asked = ChatMessage(role="user", content="Who is it?")

    def slots(*messages: ChatMessage) -> int:
        return int(llm.chat(list(messages)).raw["slots"])

    def node(text: str = "a passage", **metadata: str) -> int:
        nodes = [NodeWithScore(node=TextNode(id_="x", text=text, metadata=metadata), score=1.0)]
        [read] = shown.postprocess_nodes(nodes, query_str="Who?")
        return int(llm.complete(f"Read: {read.node.get_content(MetadataMode.LLM)}").raw["slots"])

    return {
        "system message": lambda text: slots(ChatMessage(role="system", content=f"Be brief. {text}"), asked),
        "user message": lambda text: slots(ChatMessage(role="user", content=text)),
        "assistant message": lambda text: slots(asked, ChatMessage(role="assistant", content=text), asked),
        "tool message": lambda text: slots(asked, ChatMessage(role=MessageRole.TOOL, content=text), asked),
        "text blocks": lambda text: slots(ChatMessage(role="user", blocks=[TextBlock(text=text), TextBlock(text="?")])),
        "node text": lambda text: node(f"See {text}."),
        "node metadata": lambda text: node(title=text),
        "prompt": lambda text: int(llm.complete(text).raw["slots"]),
    }


def run(seconds: float, seed: int) -> Counter[str]:
    found: Counter[str] = Counter()
    rng = random.Random(seed)
    attacks = Attacks(rng)
    fields = {
        **{("LangChain", name): read for name, read in langchain_fields(attacks.store).items()},
        **{("LlamaIndex", name): read for name, read in llama_index_fields(attacks.store).items()},
    }
    pairs = [(kind, place) for kind in KINDS for place in fields]
    used: set[tuple[str, str]] = set()
    more, number = part.Deadline(seconds), 0
    while more and number < MOST:
        kind, place = pairs[number % len(pairs)]
        number += 1
        own = rng.choice(attacks.own) if place[1] not in EXPANDED and rng.random() < OWN_SHARE else ""
        text = f"{attacks.make(kind)} {own}"
        found[f"attacks: {kind}"] += 1
        used.add(place)
        try:
            slots = fields[place](text)
        except MissingPassageError:
            found["refused with the library's own error" if kind == "replayed" else "raw errors"] += 1
            continue
        except CtxCompressError:
            found["refused with the library's own error"] += 1
            continue
        except Exception as error:
            print("raw error:", kind, place, repr(error)[:300])
            found["raw errors"] += 1
            continue
        expected = attacks.slots[own] if own else 0
        found["attacks that became slots"] += slots > expected
        found["read as literal text"] += slots == expected
        found["good markers beside them, not read"] += slots < expected
        found["good markers beside them, read"] += bool(own) and slots == expected
    for framework in ("LangChain", "LlamaIndex"):
        found[f"fields of {framework} that they stood in"] = sum(place[0] == framework for place in used)
    return found


if __name__ == "__main__":
    part.main(run, COUNTED, FAULTS)
