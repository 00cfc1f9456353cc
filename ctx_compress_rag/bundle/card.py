"""The model card (README.md) in every bundle's folder."""

from collections.abc import Mapping
from typing import Any

from ctx_compress_rag.bundle.config import BundleConfig

_LIMIT = "Compression loses detail: run `ctx-compress eval` on your own questions before you rely on it."


def model_card(config: BundleConfig, report: Mapping[str, Any], fingerprint: str) -> str:
    """Return a bundle's model card, in the hub's format; `report` is the `Bundle.report`, which may lack any key."""
    decoder = config.decoder_name or "in `decoder/`"
    recipe = report.get("recipe", {})
    license = recipe.get("decoder_license")
    facts = [
        ("Method", f"{config.method.name} ({config.method.paper})"),
        ("Decoder", f"{decoder} ({license})" if license else decoder),
        *([] if config.source is None else [("Imported from", str(config.source))]),
        ("Reads", config.reads),
        ("Base ratio", f"{config.base_ratio} source tokens per slot"),
        ("Trained ratios", ", ".join(str(r) for r in config.ratios)),
        ("Window", f"{config.window} tokens"),
        ("Fingerprint", f"`{fingerprint}`"),
        ("Trained parameters", f"{report['trained_parameters']:,}" if "trained_parameters" in report else "unknown"),
        ("Training steps", _steps(report)),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in facts)
    sources = {
        (each["data"], each["license"]): each
        for stage in _stages(report)
        for each in stage.get("recipe", {}).get("sources", [])
    }.values()
    parts = []
    if sources:
        lines = "\n".join(f"| {source['data']} | {source['license']} |" for source in sources)
        parts.append(f"## Trained on\n\n| data | license |\n|---|---|\n{lines}")
    if scores := report.get("scores"):
        tables = "\n\n".join(_score_table(name, given) for name, given in scores.items())
        parts.append(f"## Scores\n\nAnswer F1 ± standard error, as `ctx-compress eval` measures it.\n\n{tables}")
    limits = [*recipe.get("limits", ()), _LIMIT]
    parts.append("## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits))
    rest = "\n\n".join(parts)
    return f"""---
library_name: ctx-compress-rag
tags: [context-compression, rag]
---
# {config.name}

A bundle for [ctx_compress_rag](https://pypi.org/project/ctx-compress-rag/): it turns retrieved passages into
short soft contexts that the decoder reads in place of the text.

| | |
|---|---|
{table}

```python
from ctx_compress_rag import Bundle

bundle = Bundle.from_pretrained("path/to/this/folder")  # or its id on the hub
```

{rest}
"""


def _score_table(name: str, given: Mapping[str, Any]) -> str:
    """Return the F1 of one set of questions as a Markdown table, a row for each context, a column for each ratio."""
    ratios = sorted({row["ratio"] for row in given["f1"] if row["ratio"] is not None})
    cells = {(row["context"], row["ratio"]): f"{row['f1']:.3f} ± {row['error']:.3f}" for row in given["f1"]}
    lines = [["context", "", *(f"{ratio}x" for ratio in ratios)], ["---"] * (len(ratios) + 2)]
    for context in dict.fromkeys(row["context"] for row in given["f1"]):
        lines.append([context, *(cells.get((context, ratio), "") for ratio in (None, *ratios))])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{name}, {given['questions']} questions:\n\n{table}"


def _steps(report: Mapping[str, Any]) -> str:
    stages = [stage.get("steps", "unknown") for stage in _stages(report)]
    if len(stages) < 2 or "unknown" in stages:
        return str(stages[-1]) if stages else "unknown"
    return f"{sum(stages):,}, in stages of {', '.join(f'{n:,}' for n in stages[:-1])} and {stages[-1]:,}"


def _stages(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*_stages(report.get("earlier", {})), report] if report else []
