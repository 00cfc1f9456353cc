"""Register commands (with an example in the help, `--verbose`, errors on one line), and define what several share."""

import errno
import inspect
import logging
import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from io import TextIOWrapper
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer import Option
from typer.core import TyperCommand

from ctx_compress_rag.errors import ConfigError, CtxCompressError


def program(name: str) -> typer.Typer:
    """Return a command line that has no commands yet."""
    return typer.Typer(name=name, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


app = program("ctx-compress")

Run = TypeVar("Run", bound=Callable[..., None])
_VERBOSE = inspect.Parameter(
    "verbose",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("-v", "--verbose", help="Print log messages.")],
)


class _Command(TyperCommand):
    """A command that reads `--ratios 4 8` as `--ratios 4 --ratios 8`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        return super().parse_args(ctx, _repeated(args, lists))


def _repeated(args: Sequence[str], lists: set[str]) -> list[str]:
    done: list[str] = []
    option: str | None = None  # the list option that values belong to
    for arg in args:
        if arg.startswith("-"):
            option = arg if arg in lists else None
        elif option and done[-1] != option:
            done.append(option)
        done.append(arg)
    return done


def command(example: str, to: typer.Typer = app) -> Callable[[Run], Run]:
    """Return a decorator that makes `some_name_` the command `some-name` of `to`, with its docstring as help.

    `example` is the arguments of a call, without program and command, which end the help.
    """

    def register(run: Run) -> Run:
        name = run.__name__.rstrip("_").replace("_", "-")

        @wraps(run)
        def guarded(*, verbose: bool, **options: Any) -> None:
            logging.basicConfig(format="%(levelname)s: %(message)s")
            logging.getLogger("ctx_compress_rag").setLevel(logging.INFO if verbose else logging.WARNING)
            try:
                run(**options)
            except KeyboardInterrupt:
                anew = ", without --no-resume," if options.get("no_resume") else ""
                _stop(f"interrupted; the same command{anew} resumes from what was saved", 130)
            except Exception as error:
                message = _explained(error)
                if message is None:
                    raise
                _stop(f"error: {message}", 2)

        signature = inspect.signature(run, eval_str=True)
        guarded.__signature__ = signature.replace(parameters=[*signature.parameters.values(), _VERBOSE])  # type: ignore[attr-defined]
        to.command(name, cls=_Command, epilog=f"Example: {to.info.name} {name} {example}")(guarded)
        return run

    return register


def run_command(app: typer.Typer, argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code, which is 0, 2 for an error that the user can fix, or 130 if interrupted."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not end a command
    try:
        app(args=argv, prog_name=app.info.name)
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def _stop(message: str, code: int) -> None:
    print(f"ctx-compress: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _explained(error: Exception) -> str | None:
    """Return one line about an error that the user can fix; None for a bug in this program."""
    if isinstance(error, CtxCompressError):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno != errno.EPIPE:  # typer handles a closed pipe
        return text
    if type(error).__module__.partition(".")[0] == "chromadb":
        return f"Chroma cannot use the store: {text}; check that the disk has space and the folder is writable"
    return None


INDEX = "chroma"  # the default folder

# Control characters, marks that change the writing direction, and surrogates (undecodable bytes of file names).
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Codec = Literal["int8", "fp16"]
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
    Option("--extractive/--free", help="Quote the passages, or not.  [default: the bundle's]", show_default=False),
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
        help="Source tokens per slot, a multiple of the index's; with a ram bundle, 1/R of the text stays.  "
        "[default: the smallest]",
    ),
]
Ratios = Annotated[
    list[int] | None,
    Option(metavar="R...", min=1, help="Source tokens per slot; with a ram bundle, 1/R of the text stays."),
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
