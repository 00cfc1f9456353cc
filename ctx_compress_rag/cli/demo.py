"""The command `ctx-compress demo`, which tries contexts of several kinds on a small corpus and a dozen questions."""

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import Index, OwnBundle


@command("--index ./wikipedia")
def demo(index: Index = "ctx-compress-wikipedia", bundle: OwnBundle = None) -> None:
    """Try soft contexts on a small corpus.

    Indexes paragraphs of Wikipedia and answers a dozen questions about them. Each question is answered from full text,
    from passages as the bundle compresses them by default, and without context, and the answers are scored.
    """
    from ctx_compress_rag.indexing.demo import run_demo

    report = run_demo(index, bundle)
    new, known = report.stored.added, report.stored.unchanged
    print(
        f"{new} passages compressed into {index}"
        if new
        else f"all {known} passages found in {index}: nothing compressed"
    )
    questions = len(report.systems[0].answers)
    print(f"retrieval found every passage needed for {report.retrieved} of {questions} questions\n")
    print(report.tables)
