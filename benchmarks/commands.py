"""Commands of the laboratory: `python -m benchmarks NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchmarks.lab import lab
from benchmarks.world import BUNDLE
from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import (
    AnswerTokens,
    AnyBundle,
    BatchSize,
    Device,
    Dtype,
    Extractive,
    Output,
    Ratios,
    Server,
    ServerKey,
    Template,
    check_template,
    note_what_it_reads,
    quiet_models,
    read_text,
)
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.indexing import DEFAULT_BUNDLE

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle

INVENTED = str(BUNDLE)
"""The bundle that reads only the invented world."""

WORLD_PASSAGES = 4


@command("--budget 400 --jobs 2 --entries mean_pooling comprexit", lab)
def compare(
    comparison: Annotated[
        str, typer.Argument(metavar="FILE", help="A YAML file of entries, or a shipped one.")
    ] = "demo",
    budget: Annotated[int, typer.Option(metavar="STEPS", help="Training steps per entry.")] = 1000,
    entries: Annotated[
        list[str] | None, typer.Option(metavar="NAME...", help="Only these.  [default: all in the file]")
    ] = None,
    questions: Annotated[int, typer.Option(metavar="N", help="Questions to score with.")] = 200,
    passages: Annotated[int, typer.Option(metavar="N", help="Passages per prompt.")] = 1,
    decoder: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A decoder's folder or hub id, in place of the file's decoder and teacher.  [default: the file's, "
            "else the demo bundle's]",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Entries trained at the same time.")] = 1,
    table_only: Annotated[bool, typer.Option("--table-only", help="Train nothing; show the finished entries.")] = False,
    output: Output = "ctx-compress-compare",
) -> None:
    """Train methods equally and score them.

    All start from the same decoder and have the same budget. FILE also sets the data: an invented world in `demo`,
    real text in `natural`. Writes one table and one plot, also when an entry fails. Run it again after an interruption:
    finished entries are kept, the others resume at their last checkpoint.
    """
    from benchmarks.compare.config import BASELINES, Budget, chosen, load_comparison
    from benchmarks.compare.report import save, text
    from benchmarks.compare.run import Plan, prepare, run_jobs

    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: give 1 or more")
    quiet_models()
    described = load_comparison(comparison)
    if decoder is not None:
        described = described.model_copy(update={"decoder": decoder, "teacher": None})
    names = chosen(described, entries)
    folder = Path(output)
    if not table_only:
        plan = Plan(
            folder,
            described.decoder,
            described.teacher,
            Budget(budget, passages),
            questions,
            described.ratios,
            described.data,
            described.dtype,
        )
        todo = prepare(described, names, plan)
        try:
            run_jobs(todo, jobs)
        except Exception:
            if plan.result(BASELINES).exists():  # without them there is nothing to report
                save(described, folder)
            raise
    print(text(described, save(described, folder)))
    print(f"\nalso in {output}/compare.md and compare.png")


@command("book.txt --passages 1000", lab)
def bench(
    text: Annotated[str, typer.Argument(metavar="FILE", help="A text to index.")],
    bundle: AnyBundle = INVENTED,
    passages: Annotated[int, typer.Option(metavar="N", help="Maximum to index.")] = 2000,
    tokens: Annotated[int, typer.Option(metavar="N", help="Maximum per passage.")] = 256,
    ratio: Annotated[int, typer.Option(metavar="R", help="Ratio of the first token.")] = 16,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Instead, time N concurrent callers.")] = None,
    training: Annotated[bool, typer.Option("--training", help="Instead, time training steps.")] = False,
    prompt: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Instead, time the first token of BUNDLE's own decoder from N passages, at its ratios up to 16.",
        ),
    ] = None,
    server: Server = None,
    server_key: ServerKey = None,
    device: Device = None,
    dtype: Dtype = None,
    output: Output = "ctx-compress-bench",
) -> None:
    """Time indexing and the first token.

    Compares indexing with the bare encoder, and the first token from soft contexts with that from full text. The first
    token is timed with four passages and a decoder of 110 M parameters with random weights.
    """
    import tempfile
    from dataclasses import asdict

    from benchmarks.timing.speed import first_token, indexing_speed, random_bundle, speed_table
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.indexing.chunking import chunk

    given = read_text(text)
    if passages < 1:
        raise ConfigError(f"cannot index {passages} passages: give 1 or more")
    if tokens < 8:
        raise ConfigError(f"passages of {tokens} tokens are too short: give 8 or more")
    modes = {"--concurrency": concurrency is not None, "--training": training, "--prompt": prompt is not None}
    if len(wanted := [option for option, is_given in modes.items() if is_given]) > 1:
        raise ConfigError(f"{' and '.join(wanted)}: give one of them, each times something else")
    if server is not None and prompt is None:
        raise ConfigError(f"--server {server}: only the decoder that --prompt times runs there: add --prompt")
    quiet_models()
    opened = Bundle.from_pretrained(bundle, device=device, dtype=dtype)
    chunks = list(dict.fromkeys(chunk(given, opened.tokenizer, tokens)))[:passages]
    if concurrency is not None:
        time_callers(opened, chunks, concurrency, ratio, output)
        return
    if prompt is not None:
        time_first_tokens(opened, chunks, prompt, server, server_key, output)
        return
    if training:
        from benchmarks.timing.training_speed import training_speed, training_table

        steps = training_speed(opened, chunks)
        print_report(output, "training", training_table(steps), asdict(steps))
        return
    with tempfile.TemporaryDirectory() as folder:
        speed = indexing_speed(opened, chunks, folder)
    longest = sorted(chunks, key=len)[-4:]
    first = first_token(random_bundle(opened.tokenizer), longest, [ratio])[ratio]
    record = {"indexing": asdict(speed), "first_token": asdict(first), "ratio": ratio}
    print_report(output, "bench", speed_table(speed, first, ratio), record)


@command("--recipes rag_gd/demo --budget 100", lab)
def adapt_eval(
    recipes: Annotated[str, typer.Option(metavar="DIR", help="A folder of recipes, or a shipped one.")] = "rag_gd/demo",
    data: Annotated[
        list[str] | None, typer.Option(metavar="FILE...", help="JSONL files, each a task.  [default: invented ones]")
    ] = None,
    split: Annotated[Literal["dev", "test"], typer.Option(help="Split of the invented tasks.")] = "test",
    budget: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Maximum training steps per recipe, for a quick test.  [default: its own]"),
    ] = None,
    questions: Annotated[int, typer.Option(metavar="N", min=2, help="Questions to score with.")] = 400,
    timed: Annotated[int, typer.Option(metavar="N", min=1, help="Questions to time.")] = 20,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer.")] = 32,
    output: Output = "ctx-compress-adapt-eval",
) -> None:
    """Score adaptation to demonstrations.

    Compares predicted updates (RAG-GD) with their baselines. First trains what is missing: the base retrieval adapter,
    a soft prefix, the predictors. Run it again after an interruption to resume.
    """
    from benchmarks.adaptation.run import evaluate, table, verdict

    quiet_models()
    scores = evaluate(
        recipes,
        output,
        files=data or (),
        split=split,
        budget=budget,
        questions=questions,
        timed=timed,
        max_new_tokens=max_tokens,
    )
    print(f"{table(scores)}\n\n{verdict(scores)}")
    asked = scores[0].questions  # files may hold fewer
    print(f"\n{asked} questions, each with demonstrations; also in {output}/scores.json, .md and .png")


@command("--data held_out.jsonl --judge mine:judge --cost", lab)
def eval_(
    bundle: Annotated[
        str | None,
        typer.Option(
            metavar="BUNDLE",
            help="A bundle's folder, hub id or shipped name.  [default: demo; with --data, smollm2-135m]",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE...",
            help="JSONL files, scored separately.  [default: the invented world, unseen names]",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(metavar="N", help="Maximum per set.")] = 200,
    passages: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Passages per prompt; missing ones are drawn from the file's other questions.  [default: the "
            "question's own; 4 for the invented world]",
        ),
    ] = None,
    alike: Annotated[
        bool, typer.Option("--alike", help="Invented world: all passages of a prompt describe the same kind of thing.")
    ] = False,
    ratios: Ratios = None,
    codec: Annotated[
        str | None, typer.Option(metavar="CODEC", help="How slots are stored: int8, fp16 or int4.")
    ] = None,
    no_extraction: Annotated[
        bool, typer.Option("--no-extraction", help="Leave out what needs MiniLM: extraction and the token budget.")
    ] = False,
    llmlingua: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also score the baseline LLMLingua-2 with this model (folder or hub id)."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Returns a chat model that judges whether each answer is right."),
    ] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Also measure time and operations to the first token.")] = False,
    perplexity: Annotated[
        bool, typer.Option("--perplexity", help="Also score how well passages are reconstructed from their slots.")
    ] = False,
    template: Template = None,
    max_tokens: AnswerTokens = None,
    extractive: Extractive = False,
    batch_size: BatchSize = 16,
    device: Device = None,
    dtype: Dtype = None,
    in_domain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME...",
            help="Sets (file names without suffix) like the training data; they and the others get means of their own.",
        ),
    ] = None,
    card: Annotated[bool, typer.Option("--card", help="Also write the scores into BUNDLE's model card.")] = False,
    output: Output = "ctx-compress-eval",
) -> None:
    """Score a bundle against its baselines.

    These are full text, no context, and truncation, extraction and LLMLingua-2 with as many tokens as the soft context.
    With several passages in a prompt, also the soft context within a token budget: as many tokens, but finer ratios for
    passages that MiniLM finds more similar to the question. The default ratios are 4 8 16 32 64 128.
    """
    from benchmarks.scoring.judge import load_judge
    from benchmarks.scoring.lingua import LLMLingua2
    from benchmarks.world.world import world_examples
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.bundle.files import SHIPPED
    from ctx_compress_rag.evaluation.answering import RATIOS
    from ctx_compress_rag.evaluation.figures import check_plots
    from ctx_compress_rag.evaluation.questions import questions_of
    from ctx_compress_rag.evaluation.sets import evaluate_sets, question_sets
    from ctx_compress_rag.text.passage_vectors import load_minilm
    from ctx_compress_rag.text.sentences import sentences

    check_plots()
    if not no_extraction:
        sentences("")  # report a missing package before the work starts
    if questions < 2:
        raise ConfigError(f"{questions} questions have no standard error: give 2 or more")
    if passages is not None and passages < 1:
        raise ConfigError(f"{passages} passages in a prompt: give 1 or more")
    name = bundle or (DEFAULT_BUNDLE if data else INVENTED)
    if card and name in SHIPPED:
        raise ConfigError(f"--card cannot write into the shipped bundle {name!r}: give the folder of a copy")
    check_template(template)
    judging = None if judge is None else load_judge(judge)
    quiet_models()
    sets = question_sets(data or (), questions, passages or 1)
    if not sets:
        passages = passages or WORLD_PASSAGES
        examples = world_examples("test", 0, questions, max_turns=1, passages=(passages,), alike=float(alike))
        world = f"the invented world, {passages} passages{' of one kind' if alike else ''}"
        sets = {world: questions_of(examples, questions)}
    opened = Bundle.from_pretrained(name, device=device, dtype=dtype)
    if data:
        note_what_it_reads(opened)
    text = evaluate_sets(
        opened,
        sets,
        ratios or RATIOS,
        output,
        encoder=None if no_extraction else load_minilm(),
        lingua=None if llmlingua is None else LLMLingua2(llmlingua, opened.backbone.device.type),
        judge=judging,
        cost=cost,
        codec=codec,
        perplexity=perplexity,
        template=template,
        max_new_tokens=max_tokens,
        extractive=extractive,
        batch_size=batch_size,
        in_domain=in_domain or (),
        card=card,
    )
    print(f"{text}\n\nalso in {output}")


@command("passage.txt --bundle runs/comprexit/answer/bundle", lab)
def inspect(
    text: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A text, or JSONL of questions; text beyond the bundle's window is left out."
        ),
    ],
    bundle: AnyBundle,
    passages: Annotated[int, typer.Option(metavar="N", help="Maximum number of passages from JSONL.")] = 100,
    ratio: Annotated[
        int | None, typer.Option(metavar="R", help="Source tokens per slot.  [default: the bundle's own]")
    ] = None,
    output: Output = "ctx-compress-inspect",
) -> None:
    """Plot what a bundle does with a text, or on average with the passages of JSONL.

    ComprExIT: gates over layers, the transmission plan from tokens to slots, and how far slots share tokens.
    Compression tokens: how far they attend to the same tokens.
    ArcAligner: how many loops its gates give each slot, layer by layer.
    Also writes the numbers as JSON.
    """
    from benchmarks.scoring.inspect import inspect as plot
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.data.examples import read_jsonl

    if passages < 1:
        raise ConfigError(f"cannot inspect {passages} passages: give 1 or more")
    if text.endswith((".jsonl", ".jsonl.gz")):
        rows = read_jsonl(text, unanswerable=True)
        given = list(dict.fromkeys(passage for row in rows for passage in row.passages))[:passages]
    else:
        given = [read_text(text)]
    quiet_models()
    for file in plot(Bundle.from_pretrained(bundle), given, output, ratio):
        print(file)


@command("hotpotqa hotpot_dev_distractor_v1.json --output hotpotqa.jsonl", lab)
def data(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="squad, hotpotqa, hotpotqa_gold, 2wikimultihopqa, musique, nq, triviaqa, popqa, bamboogle, "
            "narrativeqa, mrqa or multinews.",
            show_default=False,
        ),
    ],
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The published file.  [default: from the hub]")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Split of the hub's set, or of NarrativeQA's file.")
    ] = "validation",
    limit: Annotated[int | None, typer.Option(metavar="N", help="Maximum questions.  [default: all]")] = None,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="File to write.  [default: NAME.jsonl]")] = None,
) -> None:
    """Write a published data set as JSONL.

    Rows have question, answers, context and, for stage ram, the evidence that the set marks, as `train` and `eval` read
    them. Sets without passages (nq, popqa, bamboogle) need a FILE with retrieved passages under "ctxs". In a FILE of
    hotpotqa, 2wikimultihopqa or musique, passages under "ctxs" replace the set's own. narrativeqa's context is the
    story's summary. Where a set has several files, FILE is, for triviaqa, the one in qa/ (its pages are in evidence/);
    for narrativeqa, qaps.csv (summaries in third_party/wikipedia/); for multinews, the .src file (summaries in .tgt).
    """
    from benchmarks.datasets.published import convert

    written = output or f"{name}.jsonl"
    print(f"{convert(name, file, written, split=split, limit=limit)} questions in {written}")


def time_callers(bundle: Bundle, passages: Sequence[str], callers: int, ratio: int, output: str) -> None:
    """Print the speed of concurrent callers: each sends four passages as soft contexts and gets 64 tokens."""
    import tempfile
    from dataclasses import asdict

    from benchmarks.timing.concurrency import concurrency, concurrency_table, endless
    from ctx_compress_rag.decoding.decoder import TransformersDecoder
    from ctx_compress_rag.errors import ConfigError
    from ctx_compress_rag.marking.mark import mark
    from ctx_compress_rag.store import SoftContextStore
    from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, messages

    if callers < 2:
        raise ConfigError(f"--concurrency {callers}: give 2 or more callers")
    if not passages:
        raise ConfigError("the text has no passages: give a longer one")
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, bundle) as store, endless(bundle):
        chats = []
        for caller in range(callers):
            own = [passages[(4 * caller + place) % len(passages)] for place in range(4)]
            text = PASSAGE_SEPARATOR.join(mark(store, own, ratio=ratio))
            chats.append(messages(TEMPLATES[0], text, "What is it about?"))
        found = concurrency(TransformersDecoder(bundle, store, batch_size=callers), chats)
    print_report(output, "concurrency", concurrency_table(found), {**asdict(found), "ratio": ratio})


def time_first_tokens(
    bundle: Bundle, passages: Sequence[str], count: int, server: str | None, server_key: str | None, output: str
) -> None:
    """Print how long the first token takes from `count` of the passages, at each of the bundle's ratios up to 16."""
    from dataclasses import asdict
    from functools import partial

    from benchmarks.timing.speed import first_token, first_token_table
    from ctx_compress_rag.decoding.decoder import TransformersDecoder
    from ctx_compress_rag.decoding.vllm import ServerDecoder
    from ctx_compress_rag.errors import ConfigError

    if not 1 <= count <= len(passages):
        raise ConfigError(f"--prompt {count}: give 1 to {len(passages)}, the number of passages in the text")
    there = partial(ServerDecoder, server=server, api_key=server_key) if server is not None else TransformersDecoder
    longest = sorted(passages, key=len)[-count:]
    found = first_token(bundle, longest, [ratio for ratio in bundle.config.ratios if ratio <= 16], 5, there)
    record = {str(ratio): asdict(first) for ratio, first in found.items()}
    print_report(output, "first_token", first_token_table(found), record)


def print_report(output: str, name: str, text: str, record: object) -> None:
    """Print tables, and write them and their numbers to a folder, as `name`.md and `name`.json."""
    from ctx_compress_rag.evaluation import report

    report.write(output, name, text, record)
    print(f"{text}\n\nalso in {output}")
