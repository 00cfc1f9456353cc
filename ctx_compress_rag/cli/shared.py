"""Options and messages that several commands share."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctx_compress_rag.bundle import Bundle


def store_option(parser: argparse.ArgumentParser) -> None:
    """Where the index is."""
    parser.add_argument("--store", required=True, metavar="DIR", help="Chroma folder")


def bundle_option(parser: argparse.ArgumentParser) -> None:
    """The bundle that the index is read with."""
    parser.add_argument("--bundle", help="a bundle's folder, hub id, or demo (default: the store's own, else demo)")


def prompt_options(parser: argparse.ArgumentParser) -> None:
    """How questions are asked, and how long answers may be."""
    parser.add_argument(
        "--template",
        type=_template,
        metavar="TEXT",
        help="the prompt, with {context} and {question}, and ||| after a system part (default: what the bundle was "
        "trained with)",
    )
    parser.add_argument(
        "--answer-tokens", type=int, metavar="N", help="most of an answer (default: what the bundle was trained with)"
    )


def _template(text: str) -> str:
    if "{context}" not in text or "{question}" not in text:
        raise argparse.ArgumentTypeError(f"template lacks {{context}} or {{question}}: {text!r}")
    return text


def note_what_it_reads(bundle: Bundle) -> None:
    """One line where the bundle was trained for other text than a user's own."""
    if bundle.config.reads != type(bundle.config).model_fields["reads"].default:
        print(
            f"note: bundle {bundle.config.name!r} reads only {bundle.config.reads}; for your own text, train one for a "
            "real decoder with `ctx-compress train RECIPE.yaml` and pass it with --bundle",
            file=sys.stderr,
        )


def quiet_models() -> None:
    """Without this, transformers shows a bar and a report for each model it loads, MiniLM included."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # those of downloads, which the line above switches off as well
