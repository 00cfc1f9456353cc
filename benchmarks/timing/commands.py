"""Commands that time: indexing, callers, bare generation, first tokens, engines, training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.lab import lab
from benchmarks.world import BUNDLE
from ctx_compress_rag.cli.shared import AnyBundle, Engine, Output, ServerKey, command, engine_options
from ctx_compress_rag.errors import ConfigError

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding.decoder import Decoder
    from ctx_compress_rag.store import SoftContextStore

Text = Annotated[str, typer.Argument(metavar="FILE", help="A text, which is cut into passages.")]
Tokens = Annotated[int, typer.Option(metavar="N", min=8, help="Maximum per passage.")]


@command("book.txt --passages 1000", lab)
def time_index(
    text: Text,
    bundle: AnyBundle = str(BUNDLE),
    passages: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum to index.")] = 2000,
    tokens: Tokens = 256,
    output: Output = "ctx-compress-bench",
) -> None:
    """Time indexing against compressing alone, of the same passages in turn."""
    import tempfile
    from dataclasses import asdict

    from benchmarks.timing.speed import indexing_speed, speed_table

    opened, chunks = _open(text, bundle, tokens)
    with tempfile.TemporaryDirectory() as folder:
        speed = indexing_speed(opened, chunks[:passages], folder)
    _report(output, "bench", speed_table(speed), asdict(speed))


@command("book.txt --callers 8", lab)
def time_callers(
    text: Text,
    bundle: AnyBundle = str(BUNDLE),
    tokens: Tokens = 256,
    callers: Annotated[int, typer.Option(metavar="N", min=2, help="How many ask at the same time.")] = 4,
    ratio: Annotated[int, typer.Option(metavar="R", help="Ratio of the passages.")] = 16,
    output: Output = "ctx-compress-bench",
) -> None:
    """Time concurrent callers: each sends four passages as soft contexts and gets 64 tokens."""
    import tempfile
    from dataclasses import asdict

    from benchmarks.timing.concurrency import concurrency, concurrency_table, endless
    from ctx_compress_rag.decoding.decoder import Decoder
    from ctx_compress_rag.marking.mark import mark_texts
    from ctx_compress_rag.store import SoftContextStore
    from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, question_messages

    opened, chunks = _open(text, bundle, tokens)
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, opened) as store, endless(opened):
        chats = []
        for caller in range(callers):
            own = [chunks[(4 * caller + place) % len(chunks)] for place in range(4)]
            context = PASSAGE_SEPARATOR.join(mark_texts(store, own, ratio=ratio))
            chats.append(question_messages(TEMPLATES[0], context, "What is it about?"))
        found = concurrency(Decoder(opened, store, batch_size=callers), chats)
    _report(output, "concurrency", concurrency_table(found), {**asdict(found), "ratio": ratio})


@command("book.txt --bundle smollm2-135m", lab)
def time_generate(
    text: Text,
    bundle: AnyBundle = str(BUNDLE),
    tokens: Tokens = 256,
    prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Passages in the prompt.")] = 1,
    ratio: Annotated[int, typer.Option(metavar="R", help="Ratio of the passages.")] = 16,
    output: Output = "ctx-compress-bench",
) -> None:
    """Time 1 and 30 tokens over transformers' `generate` on ready vectors, with the reader merged and apart."""
    import tempfile

    from benchmarks.timing.concurrency import over_generate
    from ctx_compress_rag.decoding.decoder import Decoder
    from ctx_compress_rag.evaluation import report
    from ctx_compress_rag.evaluation.answering import question_chat
    from ctx_compress_rag.marking.mark import mark_texts
    from ctx_compress_rag.store import SoftContextStore

    opened, chunks = _open(text, bundle, tokens)
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, opened) as store:
        texts = mark_texts(store, sorted(chunks, key=len)[-prompt:], ratio=ratio)
        chat = question_chat(opened.config.template, texts, "What is it about?")
        found = {new: over_generate(Decoder(opened, store), chat, new) for new in (1, 30)}
    rows = [{"tokens": str(new), **{name: f"{value:.3f}" for name, value in one.items()}} for new, one in found.items()]
    _report(output, "generate", report.markdown_table(rows), found)


@command('chroma "How long does the warranty last?"', lab)
def time_cold(
    index: Annotated[str, typer.Argument(metavar="DIR", help="An index of a bundle with a GGUF decoder.")],
    question: Annotated[str, typer.Argument(metavar="QUESTION")],
    engines: Annotated[list[str], typer.Option(metavar="NAME", help="Engines of `ask`.")] = ["transformers"],  # noqa: B006
    rounds: Annotated[int, typer.Option(metavar="N", min=1)] = 7,
    output: Output = "ctx-compress-bench",
) -> None:
    """Time `ask` from a cold start, over a script that answers from full text: wall clock, processor and memory."""
    from benchmarks.timing.cold import cold_commands, cold_table
    from ctx_compress_rag.indexing.index import open_index
    from ctx_compress_rag.models.gguf import GgufDecoder

    with open_index(index) as opened:
        decoder = opened.bundle.config.decoder
    if not isinstance(decoder, GgufDecoder) or decoder.sha256 is None:
        raise ConfigError(f"the bundle's decoder {decoder!r} is not a GGUF file: index with smollm2-135m")
    table, costs = cold_table(cold_commands(index, question, decoder.sha256, engines), rounds)
    _report(output, "cold", table, costs)


@command("book.txt --bundle smollm2-135m", lab)
def time_question(
    text: Text,
    bundle: AnyBundle = str(BUNDLE),
    tokens: Tokens = 256,
    prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Passages retrieved.")] = 4,
    output: Output = "ctx-compress-bench",
) -> None:
    """Count what a question reads from the store up to the prompt: to mark passages, then to prepare."""
    import tempfile

    from benchmarks.timing.cold import chroma_reads
    from ctx_compress_rag.decoding.preparer import PromptPreparer
    from ctx_compress_rag.evaluation import report
    from ctx_compress_rag.evaluation.answering import question_chat
    from ctx_compress_rag.marking.mark import mark_texts
    from ctx_compress_rag.store import SoftContextStore

    opened, chunks = _open(text, bundle, tokens)
    asked, longest = "What is it about?", sorted(chunks, key=len)[-prompt:]
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, opened) as store:
        store.add(longest, progress=False)
        preparer, rows = PromptPreparer(opened, store), []
        for name, own in (("slots", None), ("slots beside sentences", asked)):

            def ask(question: str | None = own) -> None:
                shown = mark_texts(store, longest, token_budget=None, question=question)
                preparer.prepare([question_chat(opened.config.template, shown, asked)], extractive=True)

            read = chroma_reads(store, ask)
            rows.append({"prompt": name, "gets": str(len(read)), "kB": f"{sum(read) / 1e3:.0f}"})
    _report(output, "question", report.markdown_table(rows), rows)


@command("book.txt --bundle smollm2-135m --prompt 8", lab)
def time_first_token(
    text: Text,
    bundle: AnyBundle = str(BUNDLE),
    tokens: Tokens = 256,
    prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Passages in the prompt.")] = 4,
    engine: Engine = "transformers",
    server_key: ServerKey = None,
    output: Output = "ctx-compress-bench",
) -> None:
    """Time the first token of BUNDLE's own decoder, from slots and from full text, at its ratios up to 16."""
    from dataclasses import asdict
    from functools import partial

    from benchmarks.timing.speed import first_token, first_token_table
    from ctx_compress_rag.decoding.decoder import Decoder

    opened, chunks = _open(text, bundle, tokens)
    if prompt > len(chunks):
        raise ConfigError(f"--prompt {prompt}: the text has {len(chunks)} passages: give a longer one")
    decoder = partial(Decoder, engine=engine, **engine_options(engine, server_key))
    ratios = [ratio for ratio in opened.config.ratios if ratio <= 16]
    found = first_token(opened, sorted(chunks, key=len)[-prompt:], ratios, 5, decoder)
    _report(output, "first_token", first_token_table(found), {str(r): asdict(first) for r, first in found.items()})


Weights = Annotated[list[str], typer.Option(metavar="W", help="Types of llama.cpp's weights.")]


@command("book.txt --bundle smollm2-135m", lab)
def time_engines(
    text: Text,
    bundle: AnyBundle = "smollm2-135m",
    tokens: Annotated[int, typer.Option(metavar="N", min=8, help="Maximum per passage.")] = 400,
    weights: Weights = ["BF16", "Q4_0"],  # noqa: B006
    rounds: Annotated[int, typer.Option(metavar="N", min=1)] = 5,
    output: Output = "ctx-compress-bench",
) -> None:
    """Time llama.cpp against transformers: one and four passages at 4x, 16x and as text, one caller and eight."""
    import tempfile

    from benchmarks.timing.concurrency import endless
    from benchmarks.timing.engines import compare_speed, speed_table
    from ctx_compress_rag.evaluation.answering import question_chat
    from ctx_compress_rag.marking.mark import mark_texts
    from ctx_compress_rag.store import SoftContextStore

    opened, chunks = _open(text, bundle, tokens)
    longest = sorted(chunks, key=len)[-32:]
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, opened) as store, endless(opened):
        store.ensure(longest)
        prompts = {}
        for count in (1, 4):
            parts = [longest[at : at + count] for at in range(0, 8 * count, count)]
            for ratio in (16, 4, None):
                shown = parts if ratio is None else [mark_texts(store, part, ratio=ratio) for part in parts]
                kind = f"{count} passage{'s' * (count > 1)}, {'text' if ratio is None else f'{ratio}x'}"
                asked = "What is it about?"
                prompts[kind] = [question_chat(opened.config.template, part, asked) for part in shown]
        decoders = _engines(opened, store, weights)
        found = compare_speed(decoders, prompts, rounds)
        positions = {
            kind: decoders["transformers"].preparer.count_chat_tokens(chats[0]) for kind, chats in prompts.items()
        }
    lengths = ", ".join(f"{kind}: {length}" for kind, length in positions.items())
    record = {f"{kind}; {label}": times for (kind, label), times in found.items()}
    _report(output, "engines", f"Positions: {lengths}\n\n{speed_table(found)}", record)


@command("squad.jsonl --questions 300", lab)
def compare_engines(
    data: Annotated[list[str], typer.Argument(metavar="FILE", help="Question sets (JSON lines).")],
    bundle: AnyBundle = "smollm2-135m",
    questions: Annotated[int, typer.Option(metavar="N", min=2, help="How many, an equal share of each file.")] = 300,
    ratio: Annotated[int, typer.Option(metavar="R")] = 4,
    weights: Weights = ["BF16", "Q8_0", "Q4_0"],  # noqa: B006
    output: Output = "ctx-compress-bench",
) -> None:
    """Compare llama.cpp's greedy answers from soft contexts with those of transformers: how many are equal, and F1."""
    from dataclasses import asdict

    import chromadb

    from benchmarks.timing.engines import answers_table, compare_answers
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.data.examples import read_jsonl, spread_examples
    from ctx_compress_rag.evaluation.questions import questions_of
    from ctx_compress_rag.store import SoftContextStore

    opened = Bundle.from_pretrained(bundle)
    asked = [q for file in data for q in spread_examples(questions_of(read_jsonl(file)), questions // len(data))]
    store = SoftContextStore(chromadb.EphemeralClient(), opened, collection="engines")
    found = compare_answers(_engines(opened, store, weights), store, asked, ratio, opened.config.template)
    _report(output, "engines_answers", answers_table(found), {name: asdict(each) for name, each in found.items()})


def _engines(bundle: Bundle, store: SoftContextStore, weights: list[str]) -> dict[str, Decoder]:
    from ctx_compress_rag.decoding.decoder import Decoder

    decoders = {"transformers": Decoder(bundle, store)}
    for each in weights:
        decoders[f"llama.cpp {each}"] = Decoder(bundle, store, engine="llama.cpp", weights=each)
    return decoders


@command("book.txt", lab)
def time_training(
    text: Text, bundle: AnyBundle = str(BUNDLE), tokens: Tokens = 256, output: Output = "ctx-compress-bench"
) -> None:
    """Time training steps: plain peft, against packed rows and compiled layers."""
    from dataclasses import asdict

    from benchmarks.timing.training_speed import training_speed, training_table

    opened, chunks = _open(text, bundle, tokens)
    steps = training_speed(opened, chunks)
    _report(output, "training", training_table(steps), asdict(steps))


def _open(text: str, bundle: str, tokens: int) -> tuple[Bundle, list[str]]:
    """A bundle, and a text's passages of at most `tokens` of its tokens."""
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.data.examples import open_text_file
    from ctx_compress_rag.indexing.chunking import chunk_text

    with open_text_file(Path(text)) as file:
        given = file.read()
    opened = Bundle.from_pretrained(bundle)
    return opened, list(dict.fromkeys(chunk_text(given, opened.tokenizer, tokens)))


def _report(output: str, name: str, text: str, record: object) -> None:
    """Print tables, and write them and their numbers to a folder, as `name`.md and `name`.json."""
    from ctx_compress_rag.evaluation import report

    report.write_report(output, name, text, record)
    print(f"{text}\n\nalso in {output}")
