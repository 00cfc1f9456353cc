"""The command line, `ctx-compress`: each command reads its arguments, calls one module and prints."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctx_compress_rag import __version__
from ctx_compress_rag.errors import CtxCompressError

if TYPE_CHECKING:
    from ctx_compress_rag.bundle import Bundle

_ANSWER_TOKENS = 256


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
        ("index", "index a folder of .txt and .md files", _index_options, _index),
        ("ask", "answer a question from an index", _ask_options, _ask),
        ("info", "say what is in an index", _info_options, _info),
        ("train", "train a bundle by recipes", _train_options, _train),
        ("eval", "score a bundle beside its baselines", _eval_options, _eval),
        ("agree", "compare answers from an index's soft contexts with those from its text", _agree_options, _agree),
        ("compare", "train methods with an equal budget and score them", _compare_options, _compare),
        ("adapt-eval", "train and score adapting to demonstrations", _adapt_eval_options, _adapt_eval),
        ("inspect", "draw what a bundle does with a text", _inspect_options, _inspect),
        ("bench", "time indexing and the first token", _bench_options, _bench),
        ("demo", "see it work on a small corpus", _demo_options, _demo),
    ):
        command = commands.add_parser(name, parents=[common], help=help_text, description=run.__doc__)
        options(command)
        command.set_defaults(run=run)
    return parser


# index


def _index_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", help="folder to index, with the folders in it; hidden files are left out"
    )
    _store_option(parser)
    _bundle_option(parser)
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        metavar="N",
        help="most decoder tokens of a passage (default: 256, or the bundle's window if less)",
    )
    parser.add_argument("--prune", action="store_true", help="remove the passages of files that are gone from DIR")
    parser.add_argument("--codec", help="how a new store keeps vectors: int8 or fp16")


def _index(args: argparse.Namespace) -> None:
    """Index a folder of .txt and .md files.

    Only new and changed passages are compressed; run it again to go on after an interruption. Passages of a
    changed file are replaced; those of a deleted file stay unless --prune is given.
    """
    from ctx_compress_rag.indexing import scan_folder, update_index
    from ctx_compress_rag.passage_index import open_index

    scan = scan_folder(args.folder)  # before models are loaded and a store is made
    _quiet_models()
    with open_index(args.store, args.bundle, codec=args.codec, create=True) as index:
        _note_what_it_reads(index.bundle)
        report = update_index(index, scan, chunk_tokens=args.chunk_tokens, prune=args.prune)
    print(f"{report.files} files in {args.folder}: {report.added} passages compressed, {report.unchanged} unchanged")
    if report.empty or report.unread:
        print(f"skipped files: {report.empty} empty, {report.unread} unreadable")
    if report.replaced or report.pruned:
        print(f"removed passages: {report.replaced} of changed files, {report.pruned} of deleted ones")
    if report.vanished:
        print(f"kept passages of deleted files: {report.vanished} (--prune removes them)")


# ask


def _ask_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", help="what to ask")
    _store_option(parser)
    _bundle_option(parser)
    parser.add_argument(
        "--ratio", type=int, default=16, help="source tokens per slot, a multiple of the store's (default: %(default)s)"
    )
    parser.add_argument("--k", type=int, default=4, help="passages to retrieve (default: %(default)s)")
    parser.add_argument("--text", action="store_true", help="give the decoder the passages' text, for comparison")


def _ask(args: argparse.Namespace) -> None:
    """Answer a question from the nearest passages, read by the decoder as soft contexts."""
    from ctx_compress_rag.asking import question_prompt
    from ctx_compress_rag.errors import ConfigError
    from ctx_compress_rag.passage_index import open_index

    if not args.question.strip():
        raise ConfigError("the question is empty: ask something")
    _quiet_models()
    with open_index(args.store, args.bundle) as index:
        from ctx_compress_rag.decoders.transformers import Sampling, TransformersDecoder

        _note_what_it_reads(index.bundle)
        [hits] = index.search([args.question], args.k)
        prompt = question_prompt(index.store, args.question, hits, None if args.text else args.ratio)
        decoder = TransformersDecoder(index.bundle, index.store)
        begun = False
        for piece in decoder.stream(prompt, Sampling(max_new_tokens=_ANSWER_TOKENS)):
            if isinstance(piece, str):
                # Some tokenizers start an answer with a space.
                print(piece if begun else piece.lstrip(), end="", flush=True)
                begun = begun or bool(piece.strip())
            else:
                print(f"\n\n{piece.prompt_tokens} prompt tokens, {piece.slots} of them slots. Sources:")
    for hit in hits:
        print(f"  {hit.similarity:.2f}  {hit.source}: {' '.join(hit.text.split())[:80]}")


# info


def _info_options(parser: argparse.ArgumentParser) -> None:
    _store_option(parser)


def _info(args: argparse.Namespace) -> None:
    """Say what is in an index."""
    from ctx_compress_rag.passage_index import inspect_index

    info = inspect_index(args.store)
    store = info.store
    rows = {
        "bundle": f"{store.bundle} ({info.bundle_name})",
        "fingerprint": store.fingerprint,
        "passages": f"{store.passages:,} from {info.sources:,} files",
        "source tokens": f"{store.source_tokens:,}",
        "slots": f"{store.slots:,} at ratio {store.base_ratio}",
        "codec": store.codec,
        "payload bytes": f"{store.payload_bytes:,}",
        "bytes on disk": f"{store.disk_bytes:,}, with texts, retrieval vectors and Chroma's own",
        "payload share": f"{store.payload_share or 0:.0%}",
    }
    for name, value in rows.items():
        print(f"{name:<14} {value}")


# train


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help="a YAML file, a folder of them, or a shipped one: a recipe such as demo/teacher, a folder such as english",
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="stop after so long, a checkpoint saved (default: at the end)"
    )
    parser.add_argument("--no-resume", action="store_true", help="start anew where a run was interrupted")


def _train(args: argparse.Namespace) -> None:
    """Run training recipes, one after the other. An interrupted run goes on at its last checkpoint.

    A recipe that has been run to its end is not run again.
    """
    from ctx_compress_rag.errors import TimeUpError
    from ctx_compress_rag.training.recipes import load_recipe, recipe_names

    recipes = [recipe for name in args.recipes for recipe in recipe_names(name)]
    for recipe in recipes:
        load_recipe(recipe)  # a fault in the last one is told before the first is run
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    from ctx_compress_rag.training.run import run_recipe  # takes seconds, which count

    try:
        for recipe in recipes:
            print(f"{recipe}: written to {run_recipe(recipe, resume=not args.no_resume, deadline=deadline)}")
    except TimeUpError as stop:
        print(stop)


# eval


def _eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", default="demo", help="a bundle's folder, hub id, or demo (the default)")
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="JSONL files, each scored apart (default: the invented world, unseen names)",
    )
    parser.add_argument(
        "--questions", type=int, default=200, metavar="N", help="at most this many of each (default: %(default)s)"
    )
    parser.add_argument(
        "--passages", type=int, default=4, metavar="N", help="of the invented world, per prompt (default: %(default)s)"
    )
    parser.add_argument("--ratios", type=int, nargs="+", metavar="R", help="default: 4 8 16 32 64 128")
    parser.add_argument("--codec", help="how slots are stored: int8 or fp16")
    parser.add_argument("--no-extraction", action="store_true", help="leave out the baseline that needs MiniLM")
    parser.add_argument(
        "--perplexity", action="store_true", help="also score how well passages are said again from their slots"
    )
    parser.add_argument("--output", default="ctx-compress-eval", metavar="DIR", help="default: ./%(default)s")


def _eval(args: argparse.Namespace) -> None:
    """Score a bundle: full text, no context, soft contexts, truncation and extraction at equal budgets."""
    from ctx_compress_rag.bundle import Bundle
    from ctx_compress_rag.demo.minilm import load_minilm
    from ctx_compress_rag.evaluation.harness import RATIOS, questions_of
    from ctx_compress_rag.evaluation.sets import evaluate_sets, question_sets
    from ctx_compress_rag.training.data import world_examples

    _quiet_models()
    sets = question_sets(args.data or (), args.questions)
    if not sets:
        examples = world_examples("test", 0, args.questions, max_turns=1, passages=(args.passages,))
        sets = {f"the invented world, {args.passages} passages": questions_of(examples, args.questions)}
    text = evaluate_sets(
        Bundle.from_pretrained(args.bundle),
        sets,
        args.ratios or RATIOS,
        args.output,
        encoder=None if args.no_extraction else load_minilm(),
        codec=args.codec,
        perplexity=args.perplexity,
    )
    print(f"{text}; also in {args.output}")


# agree


def _agree_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("questions", metavar="FILE", help="a text file with a question on each line; no answers needed")
    _store_option(parser)
    _bundle_option(parser)
    parser.add_argument(
        "--ratios", type=int, nargs="+", metavar="R", help="default: the bundle's, as far as the store has them"
    )
    parser.add_argument("--k", type=int, default=4, help="passages to retrieve (default: %(default)s)")
    parser.add_argument(
        "--worst", type=int, default=5, metavar="N", help="show so many answers that differ (default: %(default)s)"
    )
    parser.add_argument("--output", default="ctx-compress-agree", metavar="DIR", help="default: ./%(default)s")


def _agree(args: argparse.Namespace) -> None:
    """Answer questions about an index from full text and from soft contexts, and say how far the answers agree.

    No answer needs to be known. This says what compression changes, not whether the answers are right.
    """
    from ctx_compress_rag.errors import DataError
    from ctx_compress_rag.evaluation.agreement import Asked, agreement, as_text, save, table, worst
    from ctx_compress_rag.passage_index import open_index

    try:
        lines = Path(args.questions).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the questions {args.questions!r}: {error}") from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise DataError(f"{args.questions} holds no questions: write one on each line")
    _quiet_models()
    with open_index(args.store, args.bundle) as index:
        _note_what_it_reads(index.bundle)
        found = index.search(questions, args.k)
        asked = [
            Asked(question, tuple(hit.text for hit in hits), tuple(hit.id for hit in hits))
            for question, hits in zip(questions, found, strict=True)
        ]
        compared = agreement(index.store, asked, args.ratios)
        title = f"{index.bundle.config.name}: {len(questions)} questions from {Path(args.questions).name}"
    save(compared, args.output, title)
    print(table(compared))
    if differing := worst(compared, args.worst):
        print(f"\nanswers that differ at the finest ratios:\n\n{as_text(differing)}")
    print(f"\n{title}; also in {args.output}")


# compare


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "comparison", nargs="?", default="demo", metavar="FILE", help="a YAML file of entries (default: all methods)"
    )
    parser.add_argument(
        "--budget",
        type=int,
        default=1000,
        metavar="STEPS",
        help="steps of training for each entry (default: %(default)s)",
    )
    parser.add_argument("--entries", nargs="+", metavar="NAME", help="only these (default: all in the file)")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="to score with (default: %(default)s)")
    parser.add_argument("--passages", type=int, default=1, metavar="N", help="in each prompt (default: %(default)s)")
    parser.add_argument("--decoder", metavar="DIR", help="a decoder's folder or hub id (default: the demo bundle's)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="entries trained at a time (default: %(default)s)"
    )
    parser.add_argument("--table-only", action="store_true", help="train nothing: a table of what is finished")
    parser.add_argument("--output", default="ctx-compress-compare", metavar="DIR", help="default: ./%(default)s")


def _compare(args: argparse.Namespace) -> None:
    """Train methods with an equal budget from the same frozen decoder; write one table and one picture.

    Run it again after an interruption: finished entries are kept, the others go on at their last checkpoint.
    """
    from ctx_compress_rag.bundle import DECODER_FOLDER, SHIPPED
    from ctx_compress_rag.evaluation.compare import Plan, compare
    from ctx_compress_rag.evaluation.compare_report import save, text
    from ctx_compress_rag.evaluation.comparison import Budget, chosen, load_comparison

    _quiet_models()
    comparison = load_comparison(args.comparison)
    names = chosen(comparison, args.entries)
    output = Path(args.output)
    if not args.table_only:
        plan = Plan(
            output,
            args.decoder or str(SHIPPED["demo"] / DECODER_FOLDER),
            Budget(args.budget, args.passages),
            args.questions,
            comparison.ratios,
        )
        compare(comparison, names, plan, args.jobs)
    print(text(comparison, save(comparison, output)))
    print(f"\nalso in {args.output}/compare.md and compare.png")


# inspect


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="FILE", help="a text; what exceeds the bundle's window is left out")
    parser.add_argument("--bundle", required=True, help="a bundle's folder or hub id, of a method that has pictures")
    parser.add_argument("--ratio", type=int, metavar="R", help="source tokens per slot (default: the bundle's own)")
    parser.add_argument("--output", default="ctx-compress-inspect", metavar="DIR", help="default: ./%(default)s")


def _inspect(args: argparse.Namespace) -> None:
    """Draw what a bundle's method does with a text, and write the numbers as JSON.

    ComprExIT: gates over layers, and the transmission plan from tokens to slots.
    ArcAligner: how many loops its gates give each slot, layer by layer.
    """
    from ctx_compress_rag.bundle import Bundle
    from ctx_compress_rag.errors import DataError
    from ctx_compress_rag.evaluation.inspect import inspect

    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the text {args.text!r}: {error}") from error
    _quiet_models()
    for file in inspect(Bundle.from_pretrained(args.bundle), text, args.output, args.ratio):
        print(file)


# adapt-eval


def _adapt_eval_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipes", default="rag_gd/demo", metavar="DIR", help="a folder of recipes (default: the shipped %(default)s)"
    )
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="FILE", help="JSONL files, each a task (default: the invented world's)"
    )
    parser.add_argument(
        "--split", choices=("dev", "test"), default="test", help="of the invented world's tasks (default: %(default)s)"
    )
    parser.add_argument(
        "--budget",
        type=int,
        metavar="STEPS",
        help="most training steps of a recipe, for a quick look (default: its own)",
    )
    parser.add_argument("--questions", type=int, default=400, metavar="N", help="default: %(default)s")
    parser.add_argument("--timed", type=int, default=20, metavar="N", help="questions timed (default: %(default)s)")
    parser.add_argument(
        "--answer-tokens", type=int, default=32, metavar="N", help="most of an answer (default: %(default)s)"
    )
    parser.add_argument("--output", default="ctx-compress-adapt-eval", metavar="DIR", help="default: ./%(default)s")


def _adapt_eval(args: argparse.Namespace) -> None:
    """Score a decoder that adapts to demonstrations by a predicted update (RAG-GD), beside its baselines.

    Trains what is missing first: the base retrieval adapter, a soft prefix, the predictors. Run it again after an
    interruption to go on.
    """
    from ctx_compress_rag.adaptation.evaluation import evaluate, table, verdict

    _quiet_models()
    scores = evaluate(
        args.recipes,
        args.output,
        files=args.data,
        split=args.split,
        budget=args.budget,
        questions=args.questions,
        timed=args.timed,
        max_new_tokens=args.answer_tokens,
    )
    print(f"{table(scores)}\n\n{verdict(scores)}")
    print(f"\n{args.questions} questions, each with demonstrations; also in {args.output}/scores.json, .md and .png")


# bench


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="FILE", help="a text to index")
    parser.add_argument("--bundle", default="demo", help="a bundle's folder, hub id, or demo (the default)")
    parser.add_argument(
        "--passages", type=int, default=2000, metavar="N", help="at most this many (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="most per passage (default: %(default)s)")
    parser.add_argument("--ratio", type=int, default=16, metavar="R", help="for the first token (default: %(default)s)")


def _bench(args: argparse.Namespace) -> None:
    """Time indexing beside the bare encoder, and the first token from soft contexts beside full text.

    The first token is timed on four passages and a decoder of 110 M parameters with random weights.
    """
    import tempfile

    from ctx_compress_rag.bundle import Bundle
    from ctx_compress_rag.chunking import chunk
    from ctx_compress_rag.evaluation.speed import first_token, indexing_speed, random_bundle

    _quiet_models()
    bundle = Bundle.from_pretrained(args.bundle)
    text = Path(args.text).read_text(encoding="utf-8")
    passages = list(dict.fromkeys(chunk(text, bundle.tokenizer, args.tokens)))[: args.passages]
    with tempfile.TemporaryDirectory() as folder:
        speed = indexing_speed(bundle, passages, folder)
    print(f"indexed {speed.passages} passages, {speed.tokens} tokens")
    print(f"passages/s through the store {speed.passages_per_second:.1f}")
    print(f"passages/s through the encoder alone {speed.forward_passages_per_second:.1f}")
    print(f"time through the store over the encoder's (median of rounds) {speed.ratio:.2f}")
    print(f"bytes on disk over payload bytes {speed.disk_bytes / speed.payload_bytes:.2f}")
    longest = sorted(passages, key=len)[-4:]
    first = first_token(random_bundle(bundle.tokenizer), longest, args.ratio)
    print(f"first token, {first.parameters / 1e6:.0f} M parameters, {args.ratio}x")
    print(f"prompt tokens {first.soft_tokens} in place of {first.text_tokens}")
    print(
        f"soft {first.soft_seconds * 1e3:.0f} ms (fetch included), full text {first.text_seconds * 1e3:.0f} ms, "
        f"ratio (median of pairs) {first.ratio:.3f}"
    )


# demo


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", default="ctx-compress-demo", metavar="DIR", help="Chroma folder (default: ./%(default)s)"
    )
    _bundle_option(parser)


def _demo(args: argparse.Namespace) -> None:
    """Index a small corpus about invented people and places, and answer a dozen questions about it.

    Each is answered with the full text, with soft contexts and without context, and the answers are scored.
    """
    from ctx_compress_rag.demo.run import run_demo

    _quiet_models()
    report = run_demo(args.store, args.bundle)
    new, known = report.stored.added, report.stored.unchanged
    print(
        f"{new} passages compressed into {args.store}"
        if new
        else f"all {known} passages found in {args.store}: nothing compressed"
    )
    print(f"retrieval found every passage needed for {report.retrieved} of {len(report.questions)} questions\n")
    print(report.tables())
    print(f"\nscore against ratio: {Path(report.picture).resolve()}")


# shared


def _store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", required=True, metavar="DIR", help="Chroma folder")


def _bundle_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", help="a bundle's folder, hub id, or demo (default: the store's own, else demo)")


def _note_what_it_reads(bundle: Bundle) -> None:
    """One line where the bundle was trained for other text than a user's own."""
    if bundle.config.reads != type(bundle.config).model_fields["reads"].default:
        print(
            f"note: bundle {bundle.config.name!r} reads only {bundle.config.reads}; for your own text, train one for a "
            "real decoder with `ctx-compress train RECIPE.yaml` and pass it with --bundle",
            file=sys.stderr,
        )


def _quiet_models() -> None:
    """Without this, transformers shows a bar and a report for each model it loads, MiniLM included."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # those of downloads, which the line above switches off as well


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("ctx_compress_rag").setLevel(logging.INFO if verbose else logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
