"""The plot of the row `delay`: tokens a second over delay and over stages, measured and bound."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

Key = tuple[str, int, float]  # model, stages, milliseconds
Point = tuple[float, float]
Place = Callable[[float], float]

WIDTH, HEIGHT, GAP, TOP = 330, 220, 70, 46
COLOURS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#1f78b4")
TICKS = 4


def _panel(index: int, title: str, across: str, lines: Mapping[str, tuple[Sequence[Point], ...]]) -> str:
    """`lines`: by name, points of the bound and points measured."""
    left = GAP + index * (WIDTH + GAP)
    points = [point for bound, measured in lines.values() for point in (*bound, *measured)]
    if not points:
        return ""
    most_x, most_y = max(x for x, _ in points), 1.1 * max(y for _, y in points)
    least_x = min(x for x, _ in points)

    def x(value: float) -> float:
        return left + 10 + (value - least_x) / max(most_x - least_x, 1e-9) * (WIDTH - 20)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / most_y)

    parts = [f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{title}</text>']
    for tick in range(TICKS + 1):
        value = most_y * tick / TICKS
        parts.append(
            f'<path d="M{left} {y(value):.1f}h{WIDTH}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>'
        )
    parts += [
        f'<text x="{x(value):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{value:g}</text>'
        for value in sorted({px for px, _ in points})
    ]
    parts.append(
        f'<text x="{left + WIDTH / 2:.0f}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{across}</text>'
    )
    parts += _drawn(left, lines, x, y)
    return "".join(parts)


def _drawn(
    left: int,
    lines: Mapping[str, tuple[Sequence[Point], ...]],
    x: Place,
    y: Place,
) -> list[str]:
    parts = []
    for number, (name, (bound, measured)) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in bound)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="5 3"/>')
        parts += [f'<circle cx="{x(px):.1f}" cy="{y(py):.1f}" r="4" fill="{colour}"/>' for px, py in measured]
        row = TOP + HEIGHT + 54 + 16 * (number // 3)
        parts.append(f'<text x="{left + number % 3 * 115}" y="{row}" fill="{colour}">{name}</text>')
    return parts


def plot(measured: Mapping[Key, Sequence[float]], bounds: Mapping[Key, float]) -> str:
    """An SVG: over delay at two stages for each model, and over stages of the fake model for each delay."""
    at = {key: median(values) for key, values in measured.items()}

    def over(
        keep: Callable[[Key], bool], place: Callable[[Key], float]
    ) -> tuple[list[tuple[float, float]], ...]:
        keys = sorted((key for key in at if keep(key)), key=place)
        return [(place(key), bounds[key]) for key in keys], [(place(key), at[key]) for key in keys]

    models = sorted({model for model, stages, _ in at if stages == 2})
    delays = sorted({delay for model, _, delay in at if model == "fake"})
    by_delay = {m: over(lambda k, m=m: k[:2] == (m, 2), lambda k: k[2]) for m in models}  # type: ignore[misc]
    by_stages = {
        f"{d:g} ms": over(lambda k, d=d: (k[0], k[2]) == ("fake", d), lambda k: k[1])  # type: ignore[misc]
        for d in delays
    }
    panels = [
        _panel(0, "W3 over two stages, tokens/s", "one-way delay of every link, ms", by_delay),
        _panel(1, "W3 of stages that only take time, tokens/s", "stages, each on its own host", by_stages),
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="870" height="370" font-family="sans-serif" '
        f'font-size="12"><rect width="870" height="370" fill="white"/>{"".join(panels)}'
        '<text x="70" y="362">dots: measured, all hosts on two cores; dashed: bound (bench/delay_theory.py)'
        "</text></svg>\n"
    )
