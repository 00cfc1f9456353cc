"""Commands that measure and show: eval, agree, compare, adapt-eval, inspect, bench."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctx_compress_rag.cli.serving import time_callers
from ctx_compress_rag.cli.shared import bundle_option, note_what_it_reads, quiet_models, store_option


def eval_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of eval."""
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
    parser.add_argument(
        "--alike", action="store_true", help="of the invented world, all of a prompt's passages about one kind of thing"
    )
    parser.add_argument("--ratios", type=int, nargs="+", metavar="R", help="default: 4 8 16 32 64 128")
    parser.add_argument("--codec", help="how slots are stored: int8 or fp16")
    parser.add_argument("--no-extraction", action="store_true", help="leave out the baseline that needs MiniLM")
    parser.add_argument(
        "--perplexity", action="store_true", help="also score how well passages are said again from their slots"
    )
    parser.add_argument("--output", default="ctx-compress-eval", metavar="DIR", help="default: ./%(default)s")


def run_eval(args: argparse.Namespace) -> None:
    """Score a bundle: full text, no context, soft contexts, truncation and extraction at equal budgets."""
    from ctx_compress_rag.bundle import Bundle
    from ctx_compress_rag.data.examples import world_examples
    from ctx_compress_rag.evaluation.harness import RATIOS, questions_of
    from ctx_compress_rag.evaluation.sets import evaluate_sets, question_sets
    from ctx_compress_rag.text.minilm import load_minilm

    quiet_models()
    sets = question_sets(args.data or (), args.questions)
    if not sets:
        examples = world_examples(
            "test", 0, args.questions, max_turns=1, passages=(args.passages,), alike=float(args.alike)
        )
        name = f"the invented world, {args.passages} passages{' of one kind' if args.alike else ''}"
        sets = {name: questions_of(examples, args.questions)}
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


def agree_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of agree."""
    parser.add_argument("questions", metavar="FILE", help="a text file with a question on each line; no answers needed")
    store_option(parser)
    bundle_option(parser)
    parser.add_argument(
        "--ratios", type=int, nargs="+", metavar="R", help="default: the bundle's, as far as the store has them"
    )
    parser.add_argument("--k", type=int, default=4, help="passages to retrieve (default: %(default)s)")
    parser.add_argument(
        "--worst", type=int, default=5, metavar="N", help="show so many answers that differ (default: %(default)s)"
    )
    parser.add_argument("--output", default="ctx-compress-agree", metavar="DIR", help="default: ./%(default)s")


def run_agree(args: argparse.Namespace) -> None:
    """Answer questions about an index from full text and from soft contexts, and say how far the answers agree.

    No answer needs to be known. This says what compression changes, not whether the answers are right.
    """
    from ctx_compress_rag.app.passage_index import open_index
    from ctx_compress_rag.errors import DataError
    from ctx_compress_rag.evaluation.agreement import Asked, agreement, as_text, save, table, worst

    try:
        lines = Path(args.questions).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the questions {args.questions!r}: {error}") from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise DataError(f"{args.questions} holds no questions: write one on each line")
    quiet_models()
    with open_index(args.store, args.bundle) as index:
        note_what_it_reads(index.bundle)
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


def compare_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of compare."""
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


def run_compare(args: argparse.Namespace) -> None:
    """Train methods with an equal budget from the same frozen decoder; write one table and one picture.

    Run it again after an interruption: finished entries are kept, the others go on at their last checkpoint.
    """
    from ctx_compress_rag.bundle import DECODER_FOLDER, SHIPPED
    from ctx_compress_rag.evaluation.compare.config import Budget, chosen, load_comparison
    from ctx_compress_rag.evaluation.compare.report import save, text
    from ctx_compress_rag.evaluation.compare.run import Plan, compare

    quiet_models()
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


def adapt_eval_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of adapt-eval."""
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


def run_adapt_eval(args: argparse.Namespace) -> None:
    """Score a decoder that adapts to demonstrations by a predicted update (RAG-GD), beside its baselines.

    Trains what is missing first: the base retrieval adapter, a soft prefix, the predictors. Run it again after an
    interruption to go on.
    """
    from ctx_compress_rag.adaptation.evaluation import evaluate, table, verdict

    quiet_models()
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


def inspect_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of inspect."""
    parser.add_argument("text", metavar="FILE", help="a text; what exceeds the bundle's window is left out")
    parser.add_argument("--bundle", required=True, help="a bundle's folder or hub id, of a method that has pictures")
    parser.add_argument("--ratio", type=int, metavar="R", help="source tokens per slot (default: the bundle's own)")
    parser.add_argument("--output", default="ctx-compress-inspect", metavar="DIR", help="default: ./%(default)s")


def run_inspect(args: argparse.Namespace) -> None:
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
    quiet_models()
    for file in inspect(Bundle.from_pretrained(args.bundle), text, args.output, args.ratio):
        print(file)


def bench_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of bench."""
    parser.add_argument("text", metavar="FILE", help="a text to index")
    parser.add_argument("--bundle", default="demo", help="a bundle's folder, hub id, or demo (the default)")
    parser.add_argument(
        "--passages", type=int, default=2000, metavar="N", help="at most this many (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="most per passage (default: %(default)s)")
    parser.add_argument("--ratio", type=int, default=16, metavar="R", help="for the first token (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, metavar="N", help="time N callers at a time instead")


def run_bench(args: argparse.Namespace) -> None:
    """Time indexing beside the bare encoder, and the first token from soft contexts beside full text.

    The first token is timed on four passages and a decoder of 110 M parameters with random weights.
    """
    import tempfile

    from ctx_compress_rag.app.chunking import chunk
    from ctx_compress_rag.bundle import Bundle
    from ctx_compress_rag.evaluation.speed import first_token, indexing_speed, random_bundle

    quiet_models()
    bundle = Bundle.from_pretrained(args.bundle)
    text = Path(args.text).read_text(encoding="utf-8")
    passages = list(dict.fromkeys(chunk(text, bundle.tokenizer, args.tokens)))[: args.passages]
    if args.concurrency is not None:
        time_callers(bundle, passages, args.concurrency, args.ratio)
        return
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
