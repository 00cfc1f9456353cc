"""Register commands with an example in the help, `--verbose`, lists of values, and errors on one line."""

import errno
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from io import TextIOWrapper
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from ctx_compress_rag.errors import CtxCompressError


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
