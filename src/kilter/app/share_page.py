"""The page of a shared machine: slow-down and data ratio of each job over time, and decisions."""

from __future__ import annotations

from collections.abc import Sequence

from kilter.app.report import svg
from kilter.app.report.page import document, section, table
from kilter.app.report.svg import Frame, escape
from kilter.core.label import Label
from kilter.core.units import show_duration, show_energy, show_fraction
from kilter.sharing.plan.attribution import EnergyAccount
from kilter.sharing.plan.snapshot import shown
from kilter.sharing.simulate import Made, TimeStretch

_WIDTH = 860.0
_PLOT, _STRIP, _TITLE, _GAP = 74.0, 11.0, 26.0, 34.0
_MOST_STRETCHES = 1500
_MOST_DECISIONS = 200


def page(
    title: str,
    facts: Sequence[str],
    stretches: Sequence[TimeStretch],
    decisions: Sequence[Made],
    label: Label,
    *,
    energy: EnergyAccount | None = None,
) -> str:
    """One self-contained page: no script, nothing fetched."""
    tag = f"<span class='tag {label.value}'>{label.value}</span>"
    lines = "".join(f"<p class='facts'>{escape(fact)}</p>" for fact in facts)
    return document(
        title,
        f"<header><p class='kicker'>kilter share {tag}</p><h1>{escape(title)}</h1>{lines}</header>"
        f"{_jobs(stretches, tag)}{_utilisation(stretches, tag)}{_energy(energy, tag)}"
        f"{_decisions(decisions)}",
    )


def _jobs(stretches: Sequence[TimeStretch], tag: str) -> str:
    names = list(dict.fromkeys(name for s in stretches for name in s.ratios))
    if not names:
        return "<section><p>No job has run.</p></section>"
    thinned = stretches[:: -(-len(stretches) // _MOST_STRETCHES)]
    gpus = len(next(iter(stretches[0].ratios.values()), ())) or len(stretches[0].utilisation)
    height = len(names) * (_TITLE + _PLOT + gpus * _STRIP + _GAP)
    ends = (stretches[0].begin_s, stretches[-1].end_s)
    values = [value for s in stretches for value in s.slowdowns.values()]
    top = max(2.0, *values) * 1.05 if values else 2.0
    parts, y = [], 0.0
    for name in names:
        parts.append(_row(name, thinned, y, gpus, ends, top))
        y += _TITLE + _PLOT + gpus * _STRIP + _GAP
    described = "; ".join(
        f"{name}: slow-down up to {max(s.slowdowns.get(name, 0.0) for s in stretches):.2f}"
        for name in names
    )
    title = "Slow-downs and data ratios over time"
    drawing = svg.picture("jobs", _WIDTH, height, title, described, "".join(parts))
    return section(
        "Slow-down and data ratio of each job",
        "<p>The line is the time of a step over its time with the whole machine to itself. The "
        "strips below are the GPUs, from GPU 0 down: the darker, the more of the job's batch is "
        f"there.</p><figure><div class='scroll'>{drawing}</div>"
        f"<figcaption>Time runs to the right. {tag}</figcaption></figure>",
    )


def _row(
    name: str,
    stretches: Sequence[TimeStretch],
    y: float,
    gpus: int,
    ends: tuple[float, float],
    top: float,
) -> str:
    frame = Frame(
        left=44,
        top=y + _TITLE,
        right=_WIDTH - 8,
        bottom=y + _TITLE + _PLOT,
        x_range=ends,
        y_range=(0.0, top),
    )
    parts = [svg.text(0, y + 16, name, "label"), frame.grid(3)]
    points: list[tuple[float, float] | None] = []
    for stretch in stretches:
        if name not in stretch.slowdowns:
            points.append(None)
            continue
        level = frame.y(stretch.slowdowns[name])
        points += [(frame.x(stretch.begin_s), level), (frame.x(stretch.end_s), level)]
    parts.append(svg.path(points, "trace clock"))
    parts += _strips(name, stretches, frame, gpus)
    bottom = frame.bottom + gpus * _STRIP
    for moment in svg.ticks(*ends, 8):
        parts.append(
            svg.text(frame.x(moment), bottom + 15, f"{moment:g} s", "tick", anchor="middle")
        )
    return "".join(parts)


def _strips(name: str, stretches: Sequence[TimeStretch], frame: Frame, gpus: int) -> list[str]:
    """One strip a GPU; equal neighbours in time are one rectangle."""
    parts = []
    for g in range(gpus):
        runs: list[tuple[float, float, int]] = []
        for stretch in stretches:
            ratio = stretch.ratios[name][g] if name in stretch.ratios else 0
            if runs and runs[-1][2] == ratio:
                runs[-1] = (runs[-1][0], stretch.end_s, ratio)
            else:
                runs.append((stretch.begin_s, stretch.end_s, ratio))
        y = frame.bottom + 1 + g * _STRIP
        for begin, end, ratio in runs:
            if ratio:
                x, width = frame.x(begin), frame.x(end) - frame.x(begin)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_STRIP - 2:.1f}" '
                    f'class="lane recompute" fill-opacity="{ratio / 10:.1f}">'
                    f"<title>{escape(f'GPU {g}: {ratio} tenths')}</title></rect>"
                )
    return parts


def _utilisation(stretches: Sequence[TimeStretch], tag: str) -> str:
    if not stretches:
        return ""
    whole = sum(s.end_s - s.begin_s for s in stretches) or 1.0
    means = [
        sum((s.end_s - s.begin_s) * s.utilisation[g] for s in stretches) / whole
        for g in range(len(stretches[0].utilisation))
    ]
    rows = [(f"GPU {g}", show_fraction(mean)) for g, mean in enumerate(means)]
    shown = table((("GPU", ""), ("Busy", "n")), rows, "Utilisation of each GPU")
    return section("Utilisation", f"<p>Mean over the whole time. {tag}</p>", shown)


def _energy(account: EnergyAccount | None, tag: str) -> str:
    """Nothing where no meter was read."""
    metered = [] if account is None else [j for j in account.metered_j() if j is not None]
    if account is None or not metered:
        return ""
    rows = [(escape(name), show_energy(j)) for name, j in sorted(account.jobs_j().items())]
    rows.append(("while no job was there", show_energy(account.unshared_mj / 1000)))
    rows.append(("all, as metered", show_energy(sum(metered))))
    shown_table = table((("Job", "name"), ("Energy", "n")), rows, "Energy of each job")
    return section(
        "Energy",
        "<p>What a GPU draws without work is split evenly among the jobs that have a process "
        f"there, the rest by the time for which their work is on the GPU. {tag}</p>",
        shown_table,
    )


def _decisions(decisions: Sequence[Made]) -> str:
    if not decisions:
        return section("Decisions", "<p>No data ratio was changed.</p>")
    columns = (("At", "n"), ("Job", "name"), ("Ratio in tenths", ""), ("Reason", "reason"))
    rows = [
        (
            show_duration(made.t_s),
            escape(made.decision.job),
            f"{shown(made.decision.before)} &rarr; {shown(made.decision.after)}",
            escape(made.decision.reason),
        )
        for made in decisions[:_MOST_DECISIONS]
    ]
    more = len(decisions) - _MOST_DECISIONS
    rest = f"<p>And {more} more.</p>" if more > 0 else ""
    return section("Decisions", table(columns, rows, "Decisions with their reasons"), rest)
