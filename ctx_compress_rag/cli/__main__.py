"""Run `python -m ctx_compress_rag.cli`, which `accelerate launch` needs."""

import sys

from ctx_compress_rag.cli import main

if __name__ == "__main__":
    sys.exit(main())
