"""The only place that turns numbers into text."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "K", "M", "B", "T", "Q")
_SECONDS = ((1, "s"), (1e3, "ms"), (1e6, "µs"))


def format_bytes(nbytes: int) -> str:
    """A number of bytes, exact below 1 KiB, else to three digits; KiB, MiB, GiB are powers of 1024.

    Example:
        >>> format_bytes(64), format_bytes(1536), format_bytes(141_107_412_992)
        ('64 B', '1.50 KiB', '131 GiB')
    """
    return _scaled(nbytes, 1024, _BINARY)


def format_count(number: int) -> str:
    """A number of things, exact below 10,000, else to three digits; K, M, B, T are powers of 1000.

    Example:
        >>> format_count(2752), format_count(70_553_706_496)
        ('2,752', '70.6 B')
    """
    return format_exact(number) if abs(number) < 10_000 else _scaled(number, 1000, _DECIMAL)


def format_exact(number: int) -> str:
    """A number of things with every digit.

    Example:
        >>> format_exact(70553706496)
        '70,553,706,496'
    """
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """A number of things with their noun, in the plural where English wants it.

    Example:
        >>> plural(1, "tensor"), plural(41284, "module")
        ('1 tensor', '41,284 modules')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_seconds(duration: float) -> str:
    """A length of time, in the unit that a person would choose.

    Example:
        >>> [format_seconds(each) for each in (0.00042, 1.5, 75, 7260)]
        ['420 µs', '1.50 s', '1 min 15 s', '2 h 1 min']
    """
    if duration < 0:
        return "-" + format_seconds(-duration)
    # 59.95 and more would be printed as "60.0 s".
    if duration < 59.95:
        scale, unit = next((each for each in _SECONDS if duration * each[0] >= 0.9995), _SECONDS[-1])
        return f"{_digits(duration * scale)} {unit}" if duration else "0 s"
    whole = round(duration)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(duration / 60)
    return f"{minutes // 60:,} h {minutes % 60} min"


def format_shape(dims: tuple[int | str, ...] | None) -> str:
    """The shape of a tensor as Python writes it, `?` where it is not known.

    Example:
        >>> [format_shape(each) for each in ((8192, 1024), (3,), (), None)]
        ['(8192, 1024)', '(3,)', '()', '?']
    """
    if dims is None:
        return "?"
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(map(str, dims))})"


def _scaled(number: int, base: int, units: tuple[str, ...]) -> str:
    if number < 0:
        return "-" + _scaled(-number, base, units)
    if number < base:
        return f"{number} {units[0]}".rstrip()
    value, power = float(number), 0
    # Three digits of 999,999 are "1.00 M", so the rounded value decides on the unit.
    while power + 1 < len(units) and round(value) >= base:
        value, power = value / base, power + 1
    return f"{_digits(value)} {units[power]}"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    for decimals, limit in ((2, 9.995), (1, 99.95)):
        if value < limit:
            return f"{value:.{decimals}f}"
    return f"{value:,.0f}"
