"""The commands `eval`, with the tables of the papers, `confidence` and `probe`."""

from typing import Annotated

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import AnyBundle, Extractive, Output, Ratios, command
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.indexing import DEFAULT_BUNDLE


@command("--data held_out.jsonl --judge mine:judge --cost", lab)
def eval_(
    data: Annotated[list[str], typer.Option(metavar="FILE...", help="JSONL files, scored separately.")],
    bundle: AnyBundle = DEFAULT_BUNDLE,
    questions: Annotated[int, typer.Option(metavar="N", min=2, help="Maximum per set.")] = 200,
    passages: Annotated[int, typer.Option(metavar="N", min=1, help="Minimum per prompt.")] = 1,
    ratios: Ratios = None,
    llmlingua: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Also score the baseline LLMLingua-2 with this model (folder or hub id)."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Returns a chat model that judges whether each answer is right."),
    ] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Measure time and operations to the first token.")] = False,
    perplexity: Annotated[
        bool, typer.Option("--perplexity", help="Score how well passages are reconstructed from their slots.")
    ] = False,
    cases: Annotated[
        bool, typer.Option("--cases", help="Right answers by whether full text and no context are right.")
    ] = False,
    in_domain: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME...", help="Sets (file names without suffix) like the training data."),
    ] = None,
    extractive: Extractive = None,
    card: Annotated[bool, typer.Option("--card", help="Also write F1 into BUNDLE's model card.")] = False,
    output: Output = "ctx-compress-eval",
) -> None:
    """Score a bundle against its baselines, with the tables of the papers.

    Several sets also get a table of means; with --in-domain, those sets and the others apart.
    """
    from pathlib import Path

    from benchmarks.scoring.judge import JudgeTable, load_judge
    from benchmarks.scoring.lingua import LinguaTable, LLMLingua2
    from benchmarks.scoring.perplexity import PerplexityTable
    from benchmarks.scoring.tables import Table, add_table, add_to_card, case_table, macro_table
    from benchmarks.timing.cost import CostTable
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.evaluation.answering import EvaluationOptions
    from ctx_compress_rag.evaluation.harness import evaluate_sets, question_sets

    judging = None if judge is None else load_judge(judge)
    sets = question_sets(data, questions, passages)
    if unknown := sorted(set(in_domain or ()) - set(sets)):
        raise ConfigError(f"--in-domain {unknown[0]}: give names of the sets: {', '.join(sets)}")
    opened = Bundle.from_pretrained(bundle)
    ratios = ratios or opened.config.ratios
    asking: EvaluationOptions = {"extractive": extractive}
    tables: dict[str, Table] = {}
    if llmlingua is not None:
        quoted = opened.config.extractive if extractive is None else extractive
        tables["llmlingua"] = LinguaTable(LLMLingua2(llmlingua, opened.backbone.device.type), ratios, quoted)
    if judging is not None:
        tables["judged"] = JudgeTable(judging)
    if cases:
        tables["cases"] = case_table
    if cost:
        tables["costs"] = CostTable(ratios, asking)
    if perplexity:
        tables["reconstruction_perplexity"] = PerplexityTable(ratios)
    scored = evaluate_sets(opened, sets, ratios, output, **asking)
    for key, make in tables.items():
        scored = {name: add_table(opened, one, key, make) for name, one in scored.items()}
    if card:
        add_to_card(opened, scored)
        opened.save_report(bundle)
    texts = [f"### {name}\n\n{one.text}" for name, one in scored.items()]
    if len(scored) > 1:
        means = macro_table({name: one.scores for name, one in scored.items()}, in_domain or ())
        texts.append(f"Means of the {len(scored)} sets:\n\n{means}")
        Path(output, "scores.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    print("\n\n".join(texts), f"\n\nalso in {output}", sep="")


@command("--data qa_dev_squad2.jsonl.gz --questions 200 --ratio 4", lab)
def confidence(
    data: Annotated[str, typer.Option(metavar="FILE", help="JSONL, some of whose questions have no answer.")],
    bundle: AnyBundle = DEFAULT_BUNDLE,
    questions: Annotated[int, typer.Option(metavar="N", min=4, help="Maximum.")] = 200,
    ratio: Annotated[int, typer.Option(metavar="R", help="Source tokens per slot.")] = 4,
) -> None:
    """Score answers with a threshold on their log-probabilities, chosen on half of the questions."""
    from benchmarks.scoring.confidence import confidence_table, sure_answers
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.evaluation.harness import question_sets

    [asked] = question_sets([data], questions).values()
    print(confidence_table(sure_answers(Bundle.from_pretrained(bundle), asked, ratio)))


@command("train.jsonl held_out.jsonl --minilm", lab)
def probe(
    training: Annotated[str, typer.Argument(metavar="TRAINING", help="JSONL whose passages train the probe.")],
    held_out: Annotated[str, typer.Argument(metavar="HELD_OUT", help="JSONL of questions to score with.")],
    bundle: AnyBundle = DEFAULT_BUNDLE,
    minilm: Annotated[bool, typer.Option("--minilm", help="MiniLM's vectors in place of the bundle's slots.")] = False,
    ratios: Ratios = None,
    passages: Annotated[int, typer.Option(metavar="N", min=2, help="Maximum to train on.")] = 1000,
    questions: Annotated[int, typer.Option(metavar="N", min=2, help="Maximum to score with.")] = 500,
) -> None:
    """Find the first token of answers in slots by a linear map."""
    from benchmarks.scoring.linear_probe import minilm_bundle, probe_slots, probe_table
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.data.examples import distinct_passages, read_jsonl, spread_examples
    from ctx_compress_rag.data.held_out import HeldOut
    from ctx_compress_rag.evaluation.harness import question_sets

    [asked] = question_sets([held_out], questions).values()
    apart = HeldOut(read_jsonl(held_out, unanswerable=True)).without(read_jsonl(training), training)
    texts = spread_examples(distinct_passages(apart), passages)
    opened = Bundle.from_pretrained(bundle)
    probed = minilm_bundle(opened) if minilm else opened
    print(probe_table(probe_slots(probed, texts, asked, ratios or [4, 16])))
