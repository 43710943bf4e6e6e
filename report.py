"""Print tables of finished trials, and plot them.

    python report.py                                   # finished trials at --scale paper
    python report.py reverse.py fig2                   # one figure of reverse.py
    python report.py reverse.py --scale desk --out results  # results in this repository
    python report.py runs > trials.csv                 # a row per finished trial in a folder
    python report.py --write RESULTS.md                # update RESULTS.md's tables

SCRIPT is any script with figures, such as sort.py or beyond.py. Without it, tables of all
scripts are printed. Flags of SCRIPT, such as --model, work as with its --all (see python SCRIPT
--help, also for figures and scales). With FOLDER, its finished trials are printed as CSV,
without columns in which all values are equal. Plots are written to OUT/figures. Tables and
plots show means over seeds with 95% confidence intervals (Student's t). Tables also show
differences, such as PE - no PE, with 95% confidence intervals and two-sided, uncorrected
p-values (Welch's t-test, or a paired one where marked).
"""

from suite import cli, files, plots  # isort: skip # before PyTorch

import contextlib
import csv
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
from custom_encoding import CustomEncoding
from lm_shakespeare import Shakespeare
from rarity import Rarity
from stability import Stability
from suite.figures import Result, as_metric, finished_results
from suite.tables import claims_of, claims_table, contrast_table, make_caption, means_table

TASKS = [*bench.PAPER_TASKS, Stability, Shakespeare, Beyond, Rarity, CustomEncoding]
LEGEND = {  # explanations of what a table contains
    "±": "Means over seeds; ± and [ ] are 95% CIs (Student's t, n >= 3).\n"
    "Differences: Welch's t-test, p uncorrected.",
    "(paired)": "Differences marked (paired): paired t-test.",
    "censored": "Censored values lie outside the tested range and count as its nearest end.",
}
DELIMITERS = [  # of the generated parts of RESULTS.md
    "<!-- claims: made by python report.py --write, do not edit -->",
    "<!-- end of claims -->",
    "<!-- all figures: made by python report.py --write, do not edit -->",
    "<!-- end of all figures -->",
]


# -- Reading results, which may be invalid
def clean(text):
    """Replace control, markup and non-ASCII characters with question marks."""
    return re.sub(r"[^ -~]|[<>|`&$\\]", "?", str(text))


@contextlib.contextmanager
def skip_if_invalid(path):
    """Report a file that cannot be used, and continue without it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        known = isinstance(error, files.Exit | UsageError)
        message = str(error.args[-1]).removeprefix(f"{path} ") if known else repr(error)
        print(f"skipped {path}: {clean(message)[:300]}")


def finite_float(x):
    if not math.isfinite(x):
        raise UsageError(f"{x} is not finite")
    return float(x)


def make_result(trial, content, figure):
    """Return the Result in a file's content; raise an exception if it is invalid."""
    files.require_same_trial(content, trial.task)
    result = Result(
        flags=trial.flags,
        # stability.json has no metrics
        metrics=content.get("metrics") or {"by_condition": content["by_condition"]},
        config=content["config"],
        folder=trial.folder,
        seconds=finite_float(content["seconds"]),
        processes=(*map(dict, content.get("earlier", [])), content),
    )
    values, curves = {}, []
    for label, metric in figure.metrics.items():
        with contextlib.suppress(KeyError):  # the trial lacks this metric
            x = metric(result) if callable(metric) else result.metrics[metric]
            values[label] = finite_float(x)
            if "accuracy" in label and not 0 <= x <= 1:
                raise UsageError(f"{label} {x} is not in [0, 1]")
    with contextlib.suppress(KeyError):  # the trial lacks these curves
        for panel, points in figure.curves(result) if figure.curves else ():
            curves.append((clean(panel), {x: finite_float(y) for x, y in points.items()}))
    return result._replace(values=values, curves=curves)


def load_results(task_class, name, args):
    """Return the Results of a figure's trials."""
    argv = ["--scale", args.scale, "--out", str(args.out), *args.task_argv]
    results, hashes = [], set()
    for trial in cli.trials_of_figure(task_class, cli.parse(task_class, argv), name):
        result = Result(trial.flags)
        path = trial.folder / trial.task.result_file
        with skip_if_invalid(path):
            content = files.read_json(path)
            if content is not None:
                result = make_result(trial, content, task_class.figures[name])
                hashes.add(str(files.text_hashes(result.config)))
        results.append(result)
    if len(hashes) > 1:
        print(f"skipped all trials of {name}: they use {len(hashes)} different texts")
        results = [Result(result.flags) for result in results]
    return results


def figures_at(scale, task_classes=TASKS):
    """Yield (task_class, name) of every figure that has trials at this scale."""
    for task_class in task_classes:
        for name, figure in task_class.figures.items():
            if figure.grids.get(scale):
                yield task_class, name


# -- Section of a figure
def describe_provenance(finished):
    """Return the median training time and the provenance, as text."""
    seconds = np.median([result.seconds for result in finished])
    processes = [process for result in finished for process in result.processes]
    n_dirty = sum(any(p.get("dirty") for p in result.processes) for result in finished)

    def distinct(name, length=40):
        return ", ".join(sorted({clean(p.get(name) or "unknown")[:length] for p in processes}))

    provenance = (
        f"{distinct('device')}; torch {distinct('torch')}; commit {distinct('commit', 7)}"
    )
    if n_dirty:
        provenance += f" with uncommitted changes ({n_dirty} of {len(finished)})"
    return f"median training time {seconds:,.0f} s; {provenance}"


def section(task_class, name, results, args):
    """Yield the lines of a figure's section, in Markdown for --write."""
    figure = task_class.figures[name]
    metrics = [*map(as_metric, figure.metrics), *figure.summaries]
    if args.brief:
        del metrics[1:]
    yield f"### {task_class.script()} {name}"
    caption = make_caption(figure, results, metrics, args.scale)
    finished = finished_results(results)
    if not finished:
        yield caption
        out = [] if args.out == "runs" else ["--out", args.out]
        scale = [] if args.scale == "paper" else ["--scale", args.scale]
        argv = shlex.join([*scale, "--all", name, *out, *args.task_argv])
        yield f"to run these trials: python {task_class.script()} {argv}"
        return
    plot = f"{task_class.name}-{name}-{args.scale}{'-part' if args.task_argv else ''}.svg"
    link = write_plot(figure, finished, Path(args.out, "figures", plot), args.write)
    yield caption
    yield describe_provenance(finished) + link
    if args.write:
        yield "```text"
    yield from means_table(figure, results, metrics)
    yield from contrast_table(figure, results, metrics)
    if args.write:
        yield "```"
    if figure.note:
        yield figure.note


def write_plot(figure, results, path, page):
    """Write the plot if matplotlib is installed; return a link, relative to `page` if given."""
    if not figure.plot:
        return ""
    if plots.HAS_MATPLOTLIB:
        plots.plot(figure, results, path)
    if not path.exists():
        return "" if plots.HAS_MATPLOTLIB else " (the plot needs matplotlib)"
    if not page:
        return f"; plot: {path}"
    return f" ![{figure.title}]({os.path.relpath(path, os.path.dirname(page))})"


# -- RESULTS.md and trials.csv
def bench_lines(out):
    for path in sorted(Path(out).glob("bench/*.json")):
        with skip_if_invalid(path):
            content = files.read_json(path)
            lines = [*bench.timing_table(content)]
            if not content["device"].startswith("cpu"):
                lines += bench.hours_table(content)
            yield from [f"### bench.py, {path.stem}", "```text", *map(clean, lines), "```"]


def write_page(args):
    """Regenerate the page's two generated parts and trials.csv."""
    path, csv_text = Path(args.write), trials_csv(args.out)
    if not path.is_file():
        raise UsageError(f"--write {path}: no such file")
    pattern = "(.*{})\n.*({}.*{})\n.*({}.*)".format(*DELIMITERS)
    handwritten = re.fullmatch(pattern, path.read_text(), re.DOTALL)
    if not handwritten:
        raise UsageError(
            f"{path} must contain these lines, in this order: {', '.join(DELIMITERS)}"
        )
    claims, lines = [], []
    for task_class, name in figures_at(args.scale):
        results = load_results(task_class, name, args)
        link = f"#{task_class.script()} {name}".replace(".", "").replace(" ", "-")
        claims += [
            (claim, link, results) for claim in claims_of(task_class.figures[name], results)
        ]
        lines += section(task_class, name, results, args)
    lines += bench_lines(args.out)
    claims.sort(key=lambda row: row[0].family.startswith("Post hoc"))  # preregistered first
    page = [handwritten[1], *claims_table(claims), handwritten[2], *lines, handwritten[3]]
    files.write(path, "\n".join(page).encode())
    files.write(Path(args.out, "trials.csv"), csv_text.encode())


def trials_csv(folder):
    """Return a CSV of a folder's finished trials, without constant columns."""
    rows = []
    for path in sorted(Path(folder).rglob("result.json")):
        with skip_if_invalid(path):
            content = files.read_json(path)
            metrics = content["metrics"].items()
            row = dict(folder=path.parent, task=content["task"]) | content["config"]
            row |= {name: x for name, x in metrics if not isinstance(x, dict | list)}
            provenance = "seconds", "device", "torch", "commit", "dirty"
            rows.append(row | {name: content.get(name) for name in provenance})
    if not rows:
        raise UsageError(f"{folder} contains no finished trials")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [[name, *(row.get(name) for row in rows)] for name in names]
    if len(rows) > 1:
        columns = [c for c in columns if len(set(map(str, c[1:]))) > 1]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*columns))
    return "\n".join(map(clean, text.getvalue().split("\n")))


# -- The command line
def find_task_class(script):
    """Return the Task subclass defined in a script of the suite or of a user."""
    path = Path(script)
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"{script} is neither a script nor a folder; see --help")
    sys.path.insert(0, str(path.resolve().parent))
    for value in vars(importlib.import_module(path.stem)).values():
        is_local = isinstance(value, type) and value.__module__ == path.stem
        if is_local and "figures" in vars(value):
            return value
    raise UsageError(f"{script} has no figures")


def main():
    parser = cli.Parser(
        "report.py",
        __doc__,
        usage="report.py [SCRIPT [FIGURE ...] | FOLDER] [flags]",
    )
    parser.add_argument(
        "--scale", help="scale of the figures (default: paper; with --write: desk)"
    )
    parser.add_argument(
        "--out", help="folder of all trials (default: runs; with --write: results)"
    )
    parser.add_argument(
        "--brief", action="store_true", help="print only the first metric of each figure"
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        default="",
        help="update the generated tables in FILE, and OUT/trials.csv",
    )
    # Take positionals first: argparse would mistake the value of an unknown flag for one
    positionals = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    args, task_argv = parser.parse_known_args(sys.argv[1 + len(positionals) :])
    args.task_argv = task_argv
    args.scale = args.scale or ("desk" if args.write else "paper")
    args.out = args.out or ("results" if args.write else "runs")
    return cli.run_script("report.py", lambda: dispatch(args, positionals))


def dispatch(args, positionals):
    if args.write:
        if positionals or args.task_argv or args.brief:
            raise UsageError("--write accepts only the flags --scale and --out")
        write_page(args)
    elif positionals and Path(positionals[0]).is_dir():
        if sys.argv[2:]:
            raise UsageError("FOLDER takes no figure or flag")
        with contextlib.redirect_stdout(sys.stderr):  # messages about skipped files
            text = trials_csv(positionals[0])
        print(text, end="")
    else:
        print_tables(args, *positionals)
    return 0


def print_tables(args, script="", *names):
    if args.task_argv and not script:
        raise UsageError("put script and figures first: report.py reverse.py fig2 --model gru")
    available = list(figures_at(args.scale, [find_task_class(script)] if script else TASKS))
    if not available:
        raise UsageError(f"no figure has trials at --scale {args.scale}")
    choices = [name for _, name in available]
    if unknown := [name for name in names if name not in choices]:
        found = f"{unknown[0]} has no trials at --scale {args.scale}"
        raise UsageError(f"{found}; choose from: {', '.join(choices)}")
    lines, error = [], None
    for task_class, name in available:
        if not names or name in names:
            try:
                results = load_results(task_class, name, args)
            except UsageError as flag_error:
                error = error or flag_error
                continue
            if names or finished_results(results):
                lines += section(task_class, name, results, args)
            else:
                error = UsageError(
                    f"{args.out} has no finished trials at --scale {args.scale} "
                    "(for the results in this repository: --scale desk --out results)"
                )
    if not lines:
        raise error
    legend = [text for sign, text in LEGEND.items() if any(sign in line for line in lines)]
    print(*legend, *lines, sep="\n")
    if args.brief:
        argv = [Path(sys.argv[1]).name, *sys.argv[2:]]
        argv.remove("--brief")
        print(f"More metrics: python report.py {shlex.join(argv)}")


if __name__ == "__main__":
    raise SystemExit(main())
