"""Tables and plots of finished trials.

    python report.py                                   # all figures
    python report.py reverse.py fig2                   # one figure; without its name all
    python report.py reverse.py --scale desk --out results
    python report.py runs                              # CSV: finished trials in a folder
    python report.py --write RESULTS.md --out results  # the page, and results/trials.csv

Other flags select trials, as with --all. Tables have means over seeds with 95% confidence
intervals (Student's t), as have plots, and differences with 95% confidence intervals and
two-sided p-values (Welch's t-test).
"""

from suite import cli, files, plots  # isort: skip # before PyTorch

import argparse
import csv
import functools
import importlib
import io
import itertools
import math
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np

import bench
from beyond import Beyond
from common import UsageError
from lm_shakespeare import Shakespeare
from rarity import Rarity
from stability import Stability
from suite.figures import Result, Results
from suite.tables import FigureTable, claims_table

TASKS = [*bench.OF_THE_PAPER, Stability, Shakespeare, Beyond, Rarity]
BEGIN = "<!-- {}: made by python report.py --write, do not edit -->"
END = "<!-- end of {} -->"
LEGEND = "Means over seeds ± 95% CI (Student's t); differences: 95% CI, p by Welch's t-test."


# -- Finished trials
def clean(x):
    """A value of a file, with finite numbers and without control characters or markup."""
    if isinstance(x, dict):
        return {clean(name): clean(value) for name, value in x.items()}
    if isinstance(x, list):
        return [clean(value) for value in x]
    if isinstance(x, str):
        return re.sub(r"[^ -~]|[<>|`&\\]", "?", x)
    if isinstance(x, int | float) and not math.isfinite(x):
        raise ValueError(x)
    return x


def make_result(trial, content, figure):
    """The Result in a file; raises where it cannot be used."""
    if what := files.compare_trial(content, trial.task):
        raise ValueError(what)
    content = clean(content)
    result = Result(
        flags=trial.row,
        metrics=content.get("metrics") or {"by_condition": content["by_condition"]},
        folder=trial.folder,
        config=content["config"],
        seconds=float(content["seconds"]),
        processes=(*map(dict, content.get("earlier", [])), content),
    )
    values = {label: number(result, metric) for label, metric in figure.metrics.items()}
    for label, x in values.items():
        if x is not None and "accuracy" in label and not 0 <= x <= 1:
            raise ValueError(f"{label} {x}")
    return result._replace(values=values, lines=read_lines(result, figure))


def number(result, metric):
    """A metric of a trial; None where the trial does not have it."""
    try:
        x = metric(result) if callable(metric) else result.metrics[metric]
    except KeyError:
        return None
    if isinstance(x, str | bool) or not math.isfinite(x):
        raise ValueError(f"{metric} {x!r}")
    return float(x)


def read_lines(result, figure):
    """The lines that the plot draws of a trial."""
    if not figure.curves:
        return ()
    try:
        return [
            (panel, line, {x: 0.0 + y for x, y in xy.items()})
            for panel, line, xy in figure.curves(result)
        ]
    except KeyError:
        return ()


@functools.cache
def load(task_class, name, scale, out, words):
    """A figure's trials, and the Results of those done. Unusable files are named."""
    args, given = cli.parse(task_class, ["--scale", scale, "--out", str(out), *words])
    trials = cli.trials_of_figure(task_class, args, given, name)
    found = []
    for trial in trials:
        path = trial.folder / trial.task.file
        try:
            content = files.read_json(path)
            if content is not None:
                found.append(make_result(trial, content, task_class.figures[name]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are shown
            leave_out(path, error)
    texts = {str(sorted(files.fingerprints(result.config).items())) for result in found}
    if len(texts) > 1:
        print(f"left out: all {len(found)} trials, which are of {len(texts)} different texts")
        found = []
    return trials, Results(found, [trial.row for trial in trials])


def leave_out(path, error):
    print(f"left out: {path}: {clean(repr(error))[:300]}")


def figures_at(scale, task_classes=TASKS):
    """Yields (task_class, name) of every figure that has trials at this scale."""
    for task_class in task_classes:
        for name, figure in task_class.figures.items():
            if figure.grids.get(scale):
                yield task_class, name


# -- What a report says of a figure
def made_by(results):
    """How many trials, how long they took, and what made them."""
    n = f"{len(results)} of {len(results.rows)} trials"
    if not results:
        return n
    seconds = np.median([result.seconds for result in results])
    processes = []
    changed = 0
    for result in results:
        processes += result.processes
        changed += any(process.get("dirty") for process in result.processes)

    def list_different(name, length=40):
        return ", ".join(sorted({str(process.get(name))[:length] for process in processes}))

    changes = f" with local changes ({changed} of {len(results)})" if changed else ""
    where = f"{list_different('device')}; torch {list_different('torch')}"
    made = f"commit {list_different('commit', 7)}{changes}"
    return f"{n}, median {seconds:,.0f} s; {where}; {made}"


def section(task_class, name, scale, out, words=(), folder=".", brief=False):
    """The lines about a figure, on the screen or on a page in this folder."""
    figure = task_class.figures[name]
    _, results = load(task_class, name, scale, out, words)
    measures = [*figure.metrics, *figure.summaries]
    table = FigureTable(figure, results, measures[:1] if brief else measures)
    yield f"### {task_class.script()} {name}"
    title = "; ".join([figure.title, f"{scale} scale", *table.describe(), made_by(results)])
    yield title + (draw(task_class, name, scale, out, words, folder) if results else "")
    if not results:
        return
    yield "```text"
    yield from table.lines()
    if not brief:
        yield from table.contrasts()
    yield "```"
    if figure.note:
        yield figure.note


def draw(task_class, name, scale, out, words, folder):
    """Draw the plot if it is possible -> where it is."""
    figure = task_class.figures[name]
    part = "-part" if words else ""
    path = Path(out, "figures", f"{task_class.name}-{name}-{scale}{part}.svg")
    if not figure.picture:
        return ""
    if plots.CAN_DRAW:
        plots.plot(figure, load(task_class, name, scale, out, words)[1], path)
    if path.exists():
        return f" ![{figure.title}]({os.path.relpath(path, folder)})"
    return " (the plot needs matplotlib)"


# -- RESULTS.md and trials.csv
def claims_lines(out):
    """The preregistered claims of all figures."""
    claims = []
    for task_class, name in figures_at("desk"):
        _, results = load(task_class, name, "desk", out, ())
        link = f"#{task_class.script()} {name}".replace(".", "").replace(" ", "-")
        claims += [(claim, link, results) for claim in task_class.figures[name].claims]
    yield from claims_table(claims)


def figure_lines(out, folder):
    for task_class, name in figures_at("desk"):
        yield from section(task_class, name, "desk", out, folder=folder)
    for path in sorted(Path(out).glob("bench/*.json")):
        try:
            content = clean(files.read_json(path))
            lines = [*bench.table(content)]
            if not content["device"].startswith("cpu"):
                lines += bench.costs(content)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are shown
            leave_out(path, error)
        else:
            yield from [f"### bench.py, {path.stem}", "```text", *lines, "```"]


def replace_part(text, name, lines):
    """A page with the text between two markers made anew."""
    begin, end = BEGIN.format(name), END.format(name)
    head, _, rest = text.partition(begin)
    _, marker, tail = rest.partition(end)
    if not marker:
        raise UsageError(f"the page needs two lines, {begin} and {end}")
    return "\n".join([f"{head}{begin}", *lines, f"{end}{tail}"])


def write_page(path, out):
    """Make the page's two parts anew, whole or not at all."""
    path = Path(path).resolve()
    text = path.read_text()
    text = replace_part(text, "preregistered claims", claims_lines(out))
    text = replace_part(text, "all figures", figure_lines(out, path.parent))
    files.write(path, text.encode())


def trials_csv(folder):
    """A row for every finished trial in a folder: the flags and metrics that differ."""
    rows = []
    for path in sorted(Path(folder).rglob("result.json")):
        try:
            rows.append(trial_row(path, clean(files.read_json(path))))
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are shown
            leave_out(path, error)
    columns = dict.fromkeys(column for row in rows for column in row)
    different = {c: {str(row.get(c)) for row in rows} for c in columns}
    varying = [c for c in columns if len(different[c]) > 1 or len(rows) == 1]
    with io.StringIO() as text:
        writer = csv.DictWriter(text, varying, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def trial_row(path, content):
    scalars = {k: x for k, x in content["metrics"].items() if not isinstance(x, dict | list)}
    made = {k: content.get(k) for k in ("seconds", "device", "torch", "commit", "dirty")}
    folder = dict(folder=clean(str(path.parent)), task=content["task"])
    return folder | content["config"] | scalars | made


# -- The command line
def find_task_class(script):
    """The subclass of Task in a script, be it one of this suite's or a user's."""
    path = Path(script)
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"there is no script {script}")
    sys.path.insert(0, str(path.resolve().parent))
    for found in vars(importlib.import_module(path.stem)).values():
        here = isinstance(found, type) and found.__module__ == path.stem
        if here and "figures" in vars(found):
            return found
    raise UsageError(f"{script} has no figures")


def main():
    parser = cli.Parser(
        "report.py",
        usage="report.py [SCRIPT [FIGURE]] [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scale", default="paper", help="scale of the figures (paper)")
    parser.add_argument("--out", default="runs", help="folder of all trials (runs)")
    parser.add_argument("--brief", action="store_true", help="the first metric alone")
    parser.add_argument("--write", metavar="FILE", help="make this page and OUT/trials.csv")
    # Names end at the first flag: argparse would take a value of a script's flags for one
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    args, words = parser.parse_known_args(sys.argv[1 + len(names) :])
    return cli.exit_code("report.py", lambda: dispatch(args, names, tuple(words)))


def dispatch(args, names, words):
    folder = args.out if args.write else names[0] if names else ""
    if args.write or Path(folder).is_dir() and folder:
        rows = trials_csv(folder)
        if not rows.strip():
            raise UsageError(f"{folder} has no finished trial")
        if args.write:
            write_page(args.write, folder)
            files.write(Path(folder, "trials.csv"), rows.encode())
        else:
            print(rows, end="")
        return 0
    classes = [find_task_class(names[0])] if names else TASKS
    figures = [(classes[0], name) for name in names[1:]] or figures_at(args.scale, classes)
    found = False
    for task_class, name in figures:
        if name not in task_class.figures:
            known = ", ".join(task_class.figures)
            raise UsageError(f"{names[0]} has no figure {name}: choose from {known}")
        try:
            options = args.scale, args.out, words, ".", args.brief
            lines = list(section(task_class, name, *options))
        except UsageError:  # it has no such trials
            if names[1:]:
                raise
            continue
        if not found:
            print(LEGEND)
        found = True
        print(*lines, sep="\n")
    if not found:
        raise UsageError(f"no figure has trials of {' '.join(['--scale', args.scale, *words])}")
    if args.brief:
        command = classes[0].script(), *names[1:], "--scale", args.scale, "--out", args.out
        print(f"All metrics: python report.py {shlex.join([*command, *words])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
