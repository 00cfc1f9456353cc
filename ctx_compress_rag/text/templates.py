"""Prompt templates."""

import re

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
