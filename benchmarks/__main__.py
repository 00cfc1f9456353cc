"""`python -m benchmarks`."""

import sys
from collections.abc import Sequence

import benchmarks.commands
import benchmarks.world.commands  # noqa: F401, these register commands
from benchmarks.lab import lab
from ctx_compress_rag.cli.command import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code, as `ctx_compress_rag.cli.main` does."""
    return run(lab, argv)


if __name__ == "__main__":
    sys.exit(main())
