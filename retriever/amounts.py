"""Bytes and seconds as people read them."""

from __future__ import annotations

__all__ = ["duration", "size"]


def size(bytes: float) -> str:
    """32.3 GB: powers of a thousand, as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if bytes < 1000:
            return f"{bytes:.0f} {unit}" if unit == "bytes" else f"{bytes:.1f} {unit}"
        bytes /= 1000
    return f"{bytes:.1f} TB"


def duration(seconds: float) -> str:
    """90 s, 45 min, 5 h 20 min, 3 days 4 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h"
