"""A job's view as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_cli.screen import words
from grpo_cli.screen.training import LauncherReport, Training
from grpo_cli.screen.view import JobView, make_view
from grpo_operator.decide.lifecycle import IN_STATUS, describe
from grpo_spec.words import counted

STYLES = {
    "Succeeded": "bold green",
    "Running": "bold green",
    "Failed": "bold red",
    "Invalid": "bold red",
    "Restarting": "bold yellow",
}
SELF_EVIDENT = ("Running", "Succeeded", "Suspended")
LOG_LINES = 20
"""Log lines shown of a failure that ended the job, or that it restarts after."""
OLD_LOG_LINES = 4
"""Log lines shown of a failure that the job has recovered from."""
LABEL_WIDTH = 14
CURVE_WIDTH = 50
BAR_WIDTH = 30
PODS_NAMED = 4
PIPE_WIDTH = 10_000


def console(**options: Any) -> Console:
    """Return the console for commands; in a pipe it neither cuts nor wraps lines."""
    made = Console(highlight=False, **options)
    return made if made.is_terminal else Console(highlight=False, width=PIPE_WIDTH, **options)


def show(out: Console, what: RenderableType) -> None:
    """Print; in a pipe without trailing blanks."""
    if out.is_terminal:
        out.print(what)
        return
    with out.capture() as capture:
        out.print(what)
    out.file.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def screen(view: JobView) -> RenderableType:
    """Return everything about one job, the most important first."""
    parts: list[RenderableType] = [_title(view)]
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(min_width=LABEL_WIDTH, style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if view.why:
        rows.add_row("why", Text(_short_why(view)))
    if view.next_restart:
        rows.add_row("next attempt", view.next_restart)
    if view.gives_up:
        rows.add_row("fails", view.gives_up)
    if view.cure:
        rows.add_row("to do", Text(view.cure, style="bold"))
    if view.restarts:
        rows.add_row("restarts", view.restarts)
    for trouble in view.troubles:
        ranks = f" (rank{'' if trouble.ranks.isdigit() else 's'} {trouble.ranks})" if trouble.ranks else ""
        rows.add_row(
            "not ready", Text(f"{words.some(trouble.pods, PODS_NAMED)}{ranks}: {trouble.cause}", style="yellow")
        )
    if view.training:
        for label, content in _training_rows(view.training):
            rows.add_row(label, content)
    if view.training and view.training.advice:
        rows.add_row("advice", Text(view.training.advice))
    for label, text in (("held", view.bill), ("site sets", view.site)):
        if text:
            rows.add_row(label, Text(text))
    if view.warning:
        rows.add_row("warning", Text(view.warning, style="yellow"))
    if view.doing and not view.rank_phases:
        rows.add_row("rank 0", view.doing)
    for place, (phase, ranks) in enumerate(view.rank_phases.items()):
        rows.add_row("" if place else "ranks", f"{phase}: rank{'' if ranks.isdigit() else 's'} {ranks}")
    if view.note:
        rows.add_row("curve", Text(f"unknown: {view.note}", style="dim"))
    parts.append(rows)
    if view.groups:
        parts += ["", _groups(view)]
    if view.failure:
        parts += ["", _failure(view)]
    if view.events:
        parts += ["", _events(view)]
    return Group(*parts)


def _short_why(view: JobView) -> str:
    """Return why, without the failure's own sentence, which is on the same screen with its log."""
    why = view.why.removeprefix(describe(view.failure).removesuffix(IN_STATUS)) if view.failure else view.why
    if view.failure is None or why == view.why:
        return view.why
    pod = f" of {view.failure.pod}" if view.failure.pod else ""
    return f"{view.failure.reason}{pod}, see below{why}"


def is_informative(view: JobView) -> bool:
    """Whether the reason adds something to the phase."""
    return view.phase not in SELF_EVIDENT and view.reason not in ("", view.phase)


def _title(view: JobView) -> Text:
    title = Text.assemble((f"{view.namespace}/{view.name}", "bold"), "  ", (view.phase, STYLES.get(view.phase, "bold")))
    if is_informative(view):
        title.append(f" ({view.reason})")
    title.append(f"  {words.duration(view.age_seconds)} old", style="dim")
    if view.attempt:
        title.append(f"  attempt {view.attempt}", style="dim")
    return title


def _training_rows(training: Training) -> Iterable[tuple[str, RenderableType]]:
    share = training.step / training.total_steps if training.total_steps else 0.0
    parts = [f"{training.step}/{training.total_steps} steps", f"{share:.0%}"]
    if training.eta_seconds is not None and training.step < training.total_steps:
        parts.append(f"ETA {words.duration(training.eta_seconds)}")
    done = round(min(1.0, share) * BAR_WIDTH)
    yield "progress", f"{'█' * done}{'░' * (BAR_WIDTH - done)}  {' · '.join(parts)}"
    for name, values in training.curves.items():
        known = [value for value in values if value is not None]
        if not known:
            continue
        if len(values) == 1:
            yield name, f"{known[-1]:.3f}"
        else:
            tenth = max(1, len(known) // 10)  # a single step is noisy
            ends = f"{fmean(known[:tenth]):.3f} → {fmean(known[-tenth:]):.3f}"
            yield name, f"{words.sparkline(values, CURVE_WIDTH)}  {ends} in {len(values)} steps"
    if training.evaluation:
        yield "evaluated", training.evaluation
    speed = []
    if training.step_seconds is not None:
        speed.append(f"{training.step_seconds:.1f} s a step")
    if training.tokens_per_second is not None:
        speed.append(f"{training.tokens_per_second:.0f} tokens/s")
    speed.append(training.checkpoint)
    yield "", " · ".join(speed)
    if training.episodes:
        yield "episodes", training.episodes
    if training.exported:
        yield "model", training.exported
    if training.slowest:
        yield "late", Text(training.slowest, style="yellow")
    if training.idle_seconds is not None:
        idle = words.duration(training.idle_seconds)
        yield "late", Text(f"no step for {idle}", style="yellow")


def _groups(view: JobView) -> Table:
    table = _columns("GROUP", "ROLE", "READY", "PODS x GPUS", "")
    for group in view.groups:
        style = "" if group.ready >= group.desired or view.ended else "yellow"
        again = f"recreated {counted(group.incarnation, 'time')}" if group.incarnation else ""
        ready = "-" if view.ended else f"{group.ready}/{group.desired}"
        table.add_row(group.name, group.role, ready, view.shapes.get(group.name, ""), again, style=style)
    return table


def _failure(view: JobView) -> RenderableType:
    failure = view.failure
    assert failure is not None
    where = f" pod {failure.pod} on node {failure.node}" if failure.pod else ""
    code = f", exit code {failure.exit_code}" if failure.exit_code is not None and failure.exit_code >= 0 else ""
    title = Text.assemble(
        ("last failure  ", "dim"),
        (failure.reason, "bold red"),
        f"{where}{code}",
        (f"  attempt {failure.attempt}, {words.duration(view.failure_seconds)} ago", "dim"),
    )
    is_over = view.phase not in ("Failed", "Restarting")
    # The first line says what happened. The rest is a traceback or a log, whose last lines matter.
    first, *log = failure.message.splitlines() or [""]
    most = OLD_LOG_LINES if is_over else LOG_LINES
    lines = [first, *(["..."] if len(log) > most else []), *log[-most:]]
    return Group(title, Padding(Text("\n".join(lines)), (0, 0, 0, 2)))


def _events(view: JobView) -> Table:
    table = _columns("EVENT", "AGO", "MESSAGE")
    for event in view.events:
        about = f"{event.about}: " if event.about else ""
        said = event.message.replace(IN_STATUS, "")
        first, _, more = ("see above" if said == view.why else said).partition("\n")
        style = "yellow" if event.is_warning else ""
        table.add_row(
            Text(event.reason, style=style),
            words.duration(event.seconds_ago),
            Text(f"{about}{first}{' ...' if more else ''}"),
        )
    return table


def _columns(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=name not in ("MESSAGE", "WHY"), overflow="fold")
    return table


def job_table(jobs: Sequence[dict[str, Any]], now: datetime, *, namespaces: bool) -> Table:
    """Return a table with one line per job, newest last."""
    table = _columns(
        *(["NAMESPACE"] if namespaces else []), "NAME", "PHASE", "STEP", "REWARD", "TRAINER", "RESTARTS", "AGE", "WHY"
    )
    for job in sorted(jobs, key=lambda each: str(each["metadata"]["creationTimestamp"])):
        view = make_view(job, (), (), LauncherReport(), now)
        training = view.training
        step = f"{training.step}/{training.total_steps}" if training else "-"
        rewards = [value for value in training.curves.get("reward", ()) if value is not None] if training else []
        reward = f"{rewards[-1]:.3f}" if rewards else "-"
        trainers = [group for group in view.groups if group.role == "trainer"]
        ready = (
            f"{sum(g.ready for g in trainers)}/{sum(g.desired for g in trainers)}"
            if trainers and not view.ended
            else "-"
        )
        table.add_row(
            *([view.namespace] if namespaces else []),
            view.name,
            Text(view.phase, style=STYLES.get(view.phase, "")),
            step,
            reward,
            ready,
            str(view.restarts_total),
            words.duration(view.age_seconds),
            Text(view.reason if is_informative(view) else ""),
        )
    return table


def line(view: JobView) -> str:
    """Return a view as one line for logs; it changes when something happens."""
    parts = [f"{view.phase} ({view.reason})" if is_informative(view) else view.phase]
    if view.training:
        reward = [value for value in view.training.curves.get("reward", ()) if value is not None]
        parts.append(f"step {view.training.step}/{view.training.total_steps}")
        parts += [f"reward {reward[-1]:.3f}"] if reward else []
    if view.phase != "Running" and view.why:
        parts.append(view.why)
    return "  ".join(parts)
