"""`python -m benchmarks`: the commands of the laboratory."""

import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import run_command

ROOMS = "accelerator compare scoring timing adaptation datasets decoders several gguf_files world"
for room in ROOMS.split():
    import_module(f"benchmarks.{room}.commands")  # registers them


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code, as `ctx_compress_rag.cli.main` does."""
    return run_command(lab, argv)


if __name__ == "__main__":
    sys.exit(main())
