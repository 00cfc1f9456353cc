"""Writes docs/picture.svg, the picture of the README: python docs/picture.py."""

from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_suffix(".svg")

TEXT, OURS, THEIRS = "#1f2937", "#c7d2fe", "#e5e7eb"
HEIGHT, WIDTH, GAP, TOP = 46, 148, 28, 40
ROWS = {
    "Once for each passage": [
        ("passage", "your text", False),
        ("compressor", "one slot for r tokens", True),
        ("soft context", "a short matrix", True),
        ("Chroma", "beside your vectors", False),
    ],
    "For each question": [
        ("retriever", "yours", False),
        ("postprocessor", "text -> marker", True),
        ("prompt", "yours", False),
        ("LLM class", "marker -> slots", True),
        ("answer", "", False),
    ],
}


def box(x: int, y: int, title: str, note: str, ours: bool) -> str:
    """A box with a title and a smaller line under it."""
    middle = x + WIDTH // 2
    lines = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="{OURS if ours else THEIRS}"/>']
    lines.append(f'<text x="{middle}" y="{y + (20 if note else 28)}" font-weight="bold">{escape(title)}</text>')
    if note:
        lines.append(f'<text x="{middle}" y="{y + 36}" font-size="12">{escape(note)}</text>')
    return "\n".join(lines)


def arrow(x: int, y: int) -> str:
    """An arrow between two boxes, from left to right."""
    return f'<path d="M{x + 4} {y} H{x + GAP - 6}" stroke="{TEXT}" stroke-width="1.6" marker-end="url(#head)"/>'


def picture() -> str:
    """The whole picture as SVG."""
    step = WIDTH + GAP
    width = max(len(boxes) for boxes in ROWS.values()) * step - GAP + 40
    height = TOP + len(ROWS) * (HEIGHT + TOP) - 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="{TEXT}" text-anchor="middle">',
        '<marker id="head" orient="auto" markerWidth="7" markerHeight="7" refX="3" refY="3">'
        f'<path d="M0 0 L6 3 L0 6 z" fill="{TEXT}"/></marker>',
        f'<rect width="{width}" height="{height}" rx="10" fill="white"/>',
    ]
    for row, (title, boxes) in enumerate(ROWS.items()):
        y = TOP + row * (HEIGHT + TOP)
        lines.append(f'<text x="20" y="{y - 12}" text-anchor="start" font-size="13">{escape(title)}</text>')
        for place, each in enumerate(boxes):
            x = 20 + place * step
            lines.append(box(x, y, *each))
            if place:
                lines.append(arrow(x - GAP, y + HEIGHT // 2))
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
