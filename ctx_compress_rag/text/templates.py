"""Prompt templates: fill them in, and tell a prompt's passages from its question and its template's words."""

import re
from collections.abc import Sequence

PASSAGE_SEPARATOR = "\n\n"

# The prompts of LangChain's and LlamaIndex's own chains, and plain ones. A system part, if any, comes before "|||".
TEMPLATES: tuple[str, ...] = (
    "{context}\n\nQuestion: {question}",
    "Answer the question from the context.\n\nContext:\n{context}\n\nQuestion: {question}",
    "Answer the question from the context.\n\n{context}|||{question}",
    "Context information is below.\n---------------------\n{context}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\nQuery: {question}\nAnswer: ",
)

# ArcAligner, table 7, up to [T], the text, which is the answer; {context} is [B], the slots.
PARAPHRASES: tuple[str, ...] = (
    "Background: {context}. This is equivalent to:",
    "Rewrite the background in your own words: {context} \N{RIGHTWARDS ARROW}",
    "Provide a restatement of the background: {context}. Return:",
    "{context} is a paraphrase of what? Answer with:",
    "These two expressions convey the same meaning: (1) {context} (2)",
    "Restate {context} using a single sentence. Output only",
)


def question_messages(template: str, context: str, question: str) -> list[dict[str, str]]:
    """Fill in `{context}` and `{question}`, and return chat messages. A part before "|||", if any, is the system's."""
    parts = template.split("|||")
    roles = ("user",) if len(parts) == 1 else ("system", "user")
    # In one pass, and not by str.format: the texts filled in may hold braces, even "{question}".
    places = {"{question}": question, "{context}": context}
    filled = [re.sub(r"\{question\}|\{context\}", lambda place: places[place[0]], part) for part in parts]
    return [{"role": role, "content": text} for role, text in zip(roles, filled, strict=True)]


_LABEL = re.compile(r"\W*(?:\w+ ){0,3}\w+:\s+")
_GIVEN = r"(?:contexts?|passages?|documents?|sources|information|background|texts|articles|excerpts)"
_CONTEXT = re.compile(rf"(?i)\W*(?:[a-z]+ ){{0,3}}{_GIVEN}(?: [a-z]+| \d+){{0,3}}\W*?:[*_ ]*")
_QUESTION = re.compile(r"(?i)\W*(?:[a-z']+ ){0,2}(?:question|query|q)\W*?:")
_REPHRASED = re.compile(r"(?i)\b(?:question|query)\W*[:>]\W*\Z")
_RULE = re.compile(r"(?m)^ *-{6,} *$")
_TAGGED = re.compile(rf"(?is)<({_GIVEN})>(.*)</\1>")
_ANSWER = re.compile(r"(?i)\b(?:original|existing|previous|earlier) answer[^:\n]*:\s*([^\n]+)")


def without_template(text: str) -> str:
    """Return the passages of a message that has no markers: all but question and, as far as can be told, template.

    Passages are what is in a tag, between two rules, or after a label ("Context:"); else all lines. The question is the
    line with a label ("Question:"), or the first line if that alone asks, else the last line, without a label after it
    ("Answer:"). A message that asks for a question (to rephrase one) gives nothing.
    """
    if _REPHRASED.search(text):
        return ""
    if tagged := _TAGGED.search(text):
        return tagged[2]
    rules = list(_RULE.finditer(text))
    if len(rules) == 2:
        return text[rules[0].end() : rules[1].start()]
    lines = [line.rstrip() for line in text.strip().split("\n")]
    cue = lines.pop() if lines[-1].endswith(":") else ""
    asks_above = bool(lines and lines[-1])  # a cue below a blank line is what is asked, such as "Summarize it:"
    lines = "\n".join(lines).rstrip().split("\n")
    begun = next((place for place, line in enumerate(lines) if _CONTEXT.match(line)), -1)
    labeled = [place for place, line in enumerate(lines) if _QUESTION.match(line)]
    end, start = len(lines), 0
    if labeled and labeled[-1] > begun:
        end = labeled[-1]
    elif labeled or (lines[0].endswith("?") and not lines[-1].endswith("?")):
        start = 1
    elif asks_above or not cue:
        end -= 1
    kept = lines[max(start, begun) : end]
    if kept and begun >= start:
        kept[0] = _CONTEXT.sub("", kept[0], count=1)
    return "\n".join(kept)


def beside_passages(parts: Sequence[str | None]) -> list[str]:
    """Return the texts of a message that stand on a line with a passage (None), without labels and the question."""
    found = []
    lines = "".join("\0" if part is None else part.replace("\0", "") for part in parts).rstrip().split("\n")
    for place, line in enumerate(lines):
        *before, after = line.split("\0")
        for text in [*before, after] if place < len(lines) - 1 else before:
            text = _LABEL.sub("", text.strip(), count=1)
            if before and not text.endswith((":", "?")):
                found.append(text)
    return found


def answers_before(text: str) -> str:
    """Return an earlier answer that a message asks to refine, or an empty string."""
    return "\n\n".join(_ANSWER.findall(text))
