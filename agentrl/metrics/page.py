"""The shell of a page that needs nothing but itself: no script, no font, no picture from anywhere.

The content policy forbids scripts and requests, so that text which slipped through escaping could do nothing either.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.metrics.printable import html_text

__all__ = ["card", "figure", "page", "section", "table"]


def page(title: str, subtitle: str, body: str) -> str:
    """A whole HTML document. `title` and `subtitle` are text, `body` is HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{html_text(title)}</title>
<style>{_css()}</style>
</head>
<body>
<main>
<header class="top"><h1>{html_text(title)}</h1><p>{html_text(subtitle)}</p></header>
{body}
</main>
</body>
</html>
"""


def section(title: str, body: str, *, note: str = "") -> str:
    """A titled part; nothing where the body is empty. `note` is text."""
    if not body:
        return ""
    noted = f'<p class="note">{html_text(note)}</p>' if note else ""
    return f"<section><h2>{html_text(title)}</h2>{noted}{body}</section>\n"


def card(label: str, value: str, detail: str = "") -> str:
    """A number with its name and what belongs to it. All text."""
    return f'<div class="card"><p>{html_text(label)}</p><strong>{html_text(value)}</strong><small>{html_text(detail)}</small></div>'


def figure(title: str, chart: str, *, note: str = "") -> str:
    """A chart with its title; nothing where there is no chart."""
    if not chart:
        return ""
    return f"<figure><figcaption>{html_text(title)}{f'<small>{html_text(note)}</small>' if note else ''}</figcaption>{chart}</figure>"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of text, the first column named, the others numbers; nothing where there is no row."""
    if not rows:
        return ""
    header = "".join(f"<th>{html_text(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{html_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{header}</tr></thead><tbody>{lines}</tbody></table></div>'


def _css() -> str:
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")
