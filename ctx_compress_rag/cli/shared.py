"""Define options and checks that several commands share."""

import re
from typing import Annotated, Any

from typer import Option

from ctx_compress_rag.errors import ConfigError

INDEX = "chroma"  # the default folder

# Control characters, marks that change the writing direction, and surrogates (undecodable bytes of file names).
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Index = Annotated[str, Option(metavar="DIR", help="The Chroma folder of an index.")]
AnyBundle = Annotated[str, Option(metavar="BUNDLE", help="A bundle's folder, hub id or shipped name.")]
OwnBundle = Annotated[
    str | None,
    Option(metavar="BUNDLE", help="A bundle's folder, hub id or name.  [default: the index's, else smollm2-135m]"),
]
AnswerTokens = Annotated[
    int | None, Option("--max-tokens", metavar="N", min=1, help="Longest answer in tokens.  [default: as in training]")
]
Extractive = Annotated[
    bool | None,
    Option("--extractive/--free", help="Quote the passages, or not.  [default: as is best]", show_default=False),
]
TextShare = Annotated[
    float | None,
    Option(
        metavar="S",
        min=0,
        max=1,
        help="Share of the budget for the sentences nearest to the question; the rest is for slots of the best "
        "passage. 0 shows each passage as slots.  [default: as the bundle answers best]",
        show_default=False,
    ),
]
BatchSize = Annotated[int, Option(metavar="N", min=1, help="Maximum prompts per forward pass.")]
Device = Annotated[str | None, Option(metavar="NAME", help="cuda, mps or cpu.  [default: the first available]")]
Dtype = Annotated[
    str | None,
    Option(metavar="NAME", help="The decoder's dtype.  [default: bfloat16 on GPUs that have it, else float32]"),
]
Engine = Annotated[
    str, Option(metavar="NAME", help="transformers, llama.cpp, or the address of a vLLM server (see export).")
]
ServerKey = Annotated[
    str | None, Option(metavar="KEY", envvar="CTX_COMPRESS_SERVER_KEY", help="The API key of a vLLM server.")
]
Weights = Annotated[
    str | None,
    Option(metavar="TYPE", help="For llama.cpp: BF16, F32, Q8_0, Q4_0, or export's folder.  [default: BF16]"),
]
Retrieved = Annotated[int, Option("--k", metavar="N", min=1, help="Passages to retrieve.")]
Output = Annotated[str, Option(metavar="DIR", help="Folder for tables and plots.")]
Ratio = Annotated[
    int | None,
    Option(
        metavar="R",
        min=1,
        help="Source tokens per slot, a multiple of the index's; for a ram bundle, how many times shorter.  "
        "[default: the smallest]",
    ),
]
Ratios = Annotated[
    list[int] | None,
    Option(metavar="R...", min=1, help="Source tokens per slot; for a ram bundle, how many times shorter."),
]


def printable(text: str) -> str:
    """Return others' text, safe to print: control characters and surrogates become U+FFFD."""
    return _OBEYED.sub("\ufffd", text.replace("\r\n", "\n"))


def check_options_apart(**options: object) -> None:
    """Raise ConfigError if two options are given that exclude each other; None or False means not given."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value not in (None, False)]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: give one of them")


def engine_options(engine: str, server_key: str | None, **options: Any) -> Any:
    """Return the options that are not None; raise ConfigError if the engine or an option is not allowed.

    `server_key` is for a server's address alone, because it may stand in the environment: other engines leave it out.
    """
    from ctx_compress_rag.decoding.decoder import check_engine_options, is_server_address

    key = server_key if is_server_address(engine) else None
    given = {name: value for name, value in {"api_key": key, **options}.items() if value is not None}
    check_engine_options(engine, given)
    return given
