"""A timeline as bars: an SVG, and rows of characters."""

from __future__ import annotations

from html import escape

from kvern_gateway.timeline.words import Line, Story

COLOURS = {
    "held": "#9aa5b1",
    "no worker": "#c0392b",
    "queue": "#e0a030",
    "prefill": "#3b7dd8",
    "decode": "#3a9d5d",
}
_LEFT, _WIDTH, _RIGHT, _ROW, _TOP = 120, 620, 80, 26, 56
_LETTER_PX = 6.6
_WORDS_PER_ROW = int((_LEFT + _WIDTH + _RIGHT - 40) / _LETTER_PX)


def draw(story: Story) -> str:
    """A bar for each phase, below each other as they began, and the words under them."""
    scale = _WIDTH / max(story.seconds, 1e-9)
    axis = _TOP + _ROW * len(story.lines)
    words = [part for line in story.lines for part in _wrap(f"{_name(line, story)}: {line.text}")]
    height = axis + 40 + 17 * len(words)
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="ui-monospace, monospace" font-size="11" role="img">',
        f"<title>{escape(story.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    parts += [_text(20, 20 + 15 * row, line) for row, line in enumerate(_wrap(story.title)[:2])]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + share * _WIDTH
        parts.append(f'<path d="M{x:.1f} {_TOP - 6} V{axis}" stroke="#dddddd"/>')
        parts.append(_text(x, axis + 14, f"{share * story.seconds:.3g} s", "middle"))
    for row, line in enumerate(story.lines):
        y, x = _TOP + row * _ROW, _LEFT + line.start * scale
        long = max(1.5, line.seconds * scale)
        parts.append(_text(_LEFT - 10, y + 14, _name(line, story), "end"))
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{long:.1f}" height="18" rx="2" fill="{COLOURS[line.kind]}">'
            f"<title>{escape(line.text)}</title></rect>"
        )
        inside = x + long + 90 > width
        parts.append(
            _text(x - 5 if inside and x > _LEFT + 80 else x + 5, y + 13, _seconds(line), "end", "#222222")
            if inside and x > _LEFT + 80
            else _text(x + 5 if inside else x + long + 5, y + 13, _seconds(line))
        )
    parts += [_text(20, axis + 38 + 17 * row, line) for row, line in enumerate(words)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def bars(story: Story, width: int = 48) -> list[str]:
    """One row of characters for each phase: its name, its place in the whole, and its seconds."""
    scale = width / max(story.seconds, 1e-9)
    rows = []
    for line in story.lines:
        start = min(width - 1, int(line.start * scale))
        long = max(1, min(width - start, round(line.seconds * scale)))
        bar = " " * start + "█" * long
        rows.append(f"{_name(line, story):>12} │{bar:<{width}}│ {_seconds(line)}")
    return rows


def _name(line: Line, story: Story) -> str:
    several = any(other.choice for other in story.lines)
    return f"{line.kind} [{line.choice}]" if several else line.kind


def _seconds(line: Line) -> str:
    return f"{line.seconds:.2f} s" if line.seconds >= 1 else f"{line.seconds * 1e3:.1f} ms"


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def _wrap(text: str) -> list[str]:
    rows, row = [], ""
    for word in text.split():
        if row and len(row) + 1 + len(word) > _WORDS_PER_ROW:
            rows.append(row)
            row = "   " + word
        else:
            row = f"{row} {word}" if row else word
    return [*rows, row]
