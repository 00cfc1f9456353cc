"""The commands `eval` and `agree`, which compare a bundle with its baselines, and slots with text."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ctx_compress_rag.cli import shared
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.indexing import DEFAULT_BUNDLE


@shared.command("--bundle runs/mine/bundle --data held_out.jsonl --ratios 4 16")
def eval_(
    data: Annotated[list[str], Option(metavar="FILE...", help="JSONL files, scored separately.", show_default=False)],
    bundle: shared.AnyBundle = DEFAULT_BUNDLE,
    questions: Annotated[int, Option(metavar="N", min=2, help="Maximum per set.")] = 200,
    passages: Annotated[
        int | None,
        Option(metavar="N", min=1, help="Passages per prompt, the nearest added.  [default: the question's own]"),
    ] = None,
    ratios: shared.Ratios = None,
    codec: Annotated[shared.Codec | None, Option(help="Slots' codec.  [default: int8]")] = None,
    no_extraction: Annotated[
        bool, Option("--no-extraction", help="Leave out sentences, alone and in mixes: they need MiniLM.")
    ] = False,
    max_tokens: shared.AnswerTokens = None,
    extractive: shared.Extractive = None,
    batch_size: shared.BatchSize = 16,
    engine: shared.Engine = "transformers",
    server_key: shared.ServerKey = None,
    weights: shared.Weights = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    output: shared.Output = "ctx-compress-eval",
) -> None:
    """Score a bundle against its baselines.

    The baselines are full text, no context, and, in prompts of as many tokens as with soft contexts, truncation and the
    sentences nearest to the question. With several passages in a prompt, they are also the best passage alone,
    sentences beside slots of the best passage, and what the postprocessors do by default. The default ratios are those
    that the bundle was trained for.
    """
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.evaluation.harness import evaluate_sets, question_sets
    from ctx_compress_rag.evaluation.report import new_figure
    from ctx_compress_rag.text.sentences import split_sentences

    new_figure(1, 1)  # report a missing package before the work starts
    if not no_extraction:
        split_sentences("")
    options = shared.engine_options(engine, server_key, weights=weights)
    sets = question_sets(data, questions, passages or 1)
    opened = Bundle.from_pretrained(bundle, device=device, dtype=dtype)
    scored = evaluate_sets(
        opened,
        sets,
        ratios,
        output,
        sentences=not no_extraction,
        codec=codec,
        max_tokens=max_tokens,
        extractive=extractive,
        batch_size=batch_size,
        engine=engine,
        options=options,
    )
    print("\n\n".join(one.text for one in scored.values()), f"\n\nalso in {output}", sep="")


@shared.command("questions.txt --index ./chroma --ratios 4 16")
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
