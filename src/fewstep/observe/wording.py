"""Numbers and durations as people read them, in the progress line, the warnings and the report."""

from __future__ import annotations

import math


def number(value: float | int) -> str:
    """Four significant digits, without noise: ``12,000``, ``0.0312``, ``2e-4``, ``NaN``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float | int) -> str:
    """``8 s``, ``1 min 12 s``, ``3 h 04 min``, ``2 d 5 h``; a negative or non-finite time is ``?``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"
