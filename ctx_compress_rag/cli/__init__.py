"""The command line, `ctx-compress`: each command reads its arguments, calls one module and prints."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from ctx_compress_rag import __version__
from ctx_compress_rag.cli import evaluation, maintenance, serving, stores, training
from ctx_compress_rag.errors import CtxCompressError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0, 2 for an error the user can mend, 130 when interrupted."""
    args = _parser().parse_args(argv)
    _set_up_logging(args.verbose)
    try:
        args.run(args)
    except CtxCompressError as error:
        print(f"ctx-compress: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ctx-compress: interrupted; the same command goes on where it ended", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ctx-compress",
        description="Compress passages into soft contexts, keep them in Chroma, ask a local decoder.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="say what is being done")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, help_text, options, run in (
        ("index", "index a folder of .txt and .md files", stores.index_options, stores.run_index),
        ("ask", "answer a question from an index", stores.ask_options, stores.run_ask),
        ("serve", "serve an index to OpenAI clients", serving.serve_options, serving.run_serve),
        ("export", "write a bundle's decoder for vLLM", serving.export_options, serving.run_export),
        ("info", "say what is in an index", stores.info_options, stores.run_info),
        ("repair", "mend a damaged index", maintenance.repair_options, maintenance.run_repair),
        ("backup", "copy an index whole", maintenance.backup_options, maintenance.run_backup),
        ("train", "train a bundle by recipes", training.train_options, training.run_train),
        ("eval", "score a bundle beside its baselines", evaluation.eval_options, evaluation.run_eval),
        (
            "agree",
            "compare answers from an index's soft contexts with those from its text",
            evaluation.agree_options,
            evaluation.run_agree,
        ),
        (
            "compare",
            "train methods with an equal budget and score them",
            evaluation.compare_options,
            evaluation.run_compare,
        ),
        (
            "adapt-eval",
            "train and score adapting to demonstrations",
            evaluation.adapt_eval_options,
            evaluation.run_adapt_eval,
        ),
        ("inspect", "draw what a bundle does with a text", evaluation.inspect_options, evaluation.run_inspect),
        ("bench", "time indexing and the first token", evaluation.bench_options, evaluation.run_bench),
        ("demo", "see it work on a small corpus", stores.demo_options, stores.run_demo),
    ):
        command = commands.add_parser(name, parents=[common], help=help_text, description=run.__doc__)
        options(command)
        command.set_defaults(run=run)
    return parser


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("ctx_compress_rag").setLevel(logging.INFO if verbose else logging.WARNING)
