"""The command `ctx-compress agree`, which compares answers from slots and from text."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from ctx_compress_rag.cli import shared
from ctx_compress_rag.cli.command import command
from ctx_compress_rag.errors import DataError


@command("questions.txt --index ./chroma --ratios 4 16")
def agree(
    questions: Annotated[
        str, Argument(metavar="FILE", help="A text file with one question per line; no answers are needed.")
    ],
    index: shared.Index = shared.INDEX,
    bundle: shared.OwnBundle = None,
    ratios: shared.Ratios = None,
    k: shared.Retrieved = 4,
    output: shared.Output = "ctx-compress-agree",
) -> None:
    """Compare answers from slots and from text.

    Needs no reference answers, because it shows what compression changes, not whether answers are right. The best
    sentences get as many tokens. The default ratios are those that the bundle was trained for and the store can serve.
    """
    from ctx_compress_rag.data.examples import open_text_file
    from ctx_compress_rag.evaluation import agreement
    from ctx_compress_rag.evaluation.questions import Question
    from ctx_compress_rag.indexing.index import open_index

    if questions.endswith((".jsonl", ".json")):  # whole lines would be asked, with braces and answers
        raise DataError(f"{questions!r} is JSON: give a text file with one question per line")
    with open_text_file(Path(questions)) as lines:
        asked = [line.strip() for line in lines if line.strip()]
    if not asked:
        raise DataError(f"{questions!r} holds no questions: add some")
    Path(output).mkdir(parents=True, exist_ok=True)  # not only after the answers, which would be lost if it failed
    with open_index(index, bundle) as opened:
        found = opened.search(asked, k)
        given = [Question(tuple(h.text for h in hits), each, ()) for each, hits in zip(asked, found, strict=True)]
        ids = {hit.text: hit.id for hits in found for hit in hits}
        compared = agreement.measure_agreement(opened.store, given, ratios, ids=ids)
        name = opened.bundle.config.name
    agreement.save_agreement(compared, output)
    print(agreement.agreement_table(compared))
    if differing := agreement.worst_agreements(compared):
        print(f"\nanswers that differ at the finest ratios:\n\n{agreement.agreement_text(differing)}")
    print(f"\n{name}: {len(asked)} questions from {Path(questions).name}; all answers are in {output}")
    print(f"\n{agreement.agreement_advice(compared)}")
