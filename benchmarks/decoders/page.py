"""The page of the documentation that says what the library can do with which decoder."""

import re
import textwrap
from collections.abc import Mapping

from packaging.version import Version

from benchmarks.decoders.outcome import YES
from benchmarks.decoders.trial import WAYS

_HEAD = """# Decoders

What `python -m benchmarks decoders` found with transformers {version}. Of each decoder-only type a tiny model with
random weights was saved, loaded and tried; {right} of {count} types answer and train. Results are compared with a plain
computation, or refused with a reason.
{others}
- *Answer*: one prompt, several, and a stream have the log-probabilities of transformers' own passes over token ids.
- *Train*: every adapter moves, losses are those of prompts one by one, and a saved bundle compresses, reads and answers
  as before.
- *Shared passes*: several callers' prompts are answered together, or one by one.
- *vLLM*, *llama.cpp*: `export` writes weights with the right logits. What llama.cpp runs:
  [table](serving.md#decoders-in-gguf-files).

"""

_METHODS = """
## Other methods

`tests/models/test_decoders.py` trains, reloads and asks these, and compares with plain passes:

| types | compression tokens | RAM | ComprExIT | ArcAligner |
|---|---|---|---|---|
| deepseek_v3, gemma4_text, gpt_oss, llama, llama4_text | yes | yes | yes | yes |
| falcon_h1, mamba2 | refused: a state reads on past a mask | yes | yes | yes |
| gemma3n_text | yes | yes | refused: layers pass on four streams | refused: the same |
"""  # the test `test_other_methods_are_right_or_refused`

# What an error says of one type, in words that fit all of them.
_OWN_WORDS = {
    r"cannot load the decoder '[^']*': |bundle 'tiny': ": "",
    r"\b\w+(For\w+|LMHeadModel) of transformers [\d.]+": "it",
    r" in torch\.\w+(?= when)": "",
    r"\(\w+Error: .*?\)(?=[:;,])|\(\w+_text\)": "",
    r" ?: choose another decoder.*": "",
    r"model\.layers\S+ and \S+": "layers",
    r"the type '\w+'": "its type",
}


def decoder_page(kept: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """Return the page in Markdown from each version's outcomes: by type, and what it goes through.

    The table is of the newest version. Types with the same outcomes are one row, and reasons stand below, by number.
    """
    version, *older = sorted(kept, key=Version, reverse=True)
    found = kept[version]
    reasons: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, said in sorted(found.items()):
        cells = tuple(_cell(said[way], name, reasons) for way in WAYS)
        rows.setdefault(cells, []).append(name)
    lines = [f"| types | {' | '.join(way.capitalize() if way.isalpha() and way.islower() else way for way in WAYS)} |"]
    lines.append("|---" * (len(WAYS) + 1) + "|")
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in sorted(rows.items(), key=_size)]
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    others = "".join(f"\n{_other(name, kept[name])}" for name in older)
    head = _HEAD.format(version=version, right=len(found) - len(_not_right(found)), count=len(found), others=others)
    return head + "\n".join(lines) + "\n" + _METHODS


def _other(version: str, found: Mapping[str, Mapping[str, str]]) -> str:
    wrong = _not_right(found)
    said = f"With transformers {version}, {len(found) - len(wrong)} of its {len(found)} do"
    return textwrap.fill(f"{said}; the others are {', '.join(wrong)}." if wrong else f"{said}.", 120) + "\n"


def _not_right(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    return sorted(name for name, said in found.items() if not said["answer"] == YES == said["train"])


def _size(row: tuple[tuple[str, ...], list[str]]) -> int:
    return -len(row[1])


def _cell(said: str, name: str, reasons: dict[str, int]) -> str:
    kind, _, reason = said.partition(": ")
    if not reason:
        return said
    for pattern, instead in _OWN_WORDS.items():
        reason = re.sub(pattern, instead, reason.replace(f"({name})", ""))
    reason = " ".join(reason.split())
    number = reasons.setdefault(reason[:1].upper() + reason[1:], len(reasons) + 1)
    return f"{'no' if kind == 'refused' else kind} ({number})"
