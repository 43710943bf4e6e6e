"""Bring the committed results to today's names of tasks and flags, once; then this is deleted.

    python migrate.py results

Only `task` and `config` of result.json and stability.json change. A flag that today's trial
has must have the same value in the file, or be missing there and have its default today. A flag
that today's trial lacks must have had no effect.
"""

import sys
from pathlib import Path

import report
from dual_frequency import DualFrequency
from sort import Sort
from suite import cli, files

GONE = {  # flags that older files have, and the value that had no effect
    "blocks": 1,
    "encode": "both",
    "min_length": None,
    "no_conv": False,
    "positions": None,
    "rotate": False,
    "slow": False,
}


def migrate(task):
    path = task.folder / task.file
    content = files.read_json(path)
    if content is None:
        return 0
    old, new = content["config"], dict(task.config)
    if task.file == "stability.json":
        old = {"pairs": content.get("pairs"), "target": content.get("target")} | old
    defaults = cli.defaults_of(type(task)) | type(task).defaults(task.args)
    for name in new.keys() | old.keys():
        if name.endswith("_sha256"):
            new[name] = old[name]
        elif name in new and name not in old:
            assert new[name] == defaults[name], (path, name, new[name], defaults[name])
        elif name in new:
            assert old[name] == new[name], (path, name, old[name], new[name])
        else:
            expected = isinstance(task, DualFrequency) if name == "dual_freq" else GONE[name]
            assert old[name] == expected, (path, name, old[name])
    if content["task"] == task.name and old == new:
        return 0
    assert content["task"] in (task.name, "reverse"), (path, content["task"])
    content |= {"task": task.name, "config": dict(sorted(new.items()))}
    files.write_json(path, content)
    return 1


def main(out):
    seen = set()
    changed = 0
    for scale in ("paper", "desk", "quick"):
        for task_class, name in report.figures_at(scale):
            args, given = cli.parse(task_class, ["--scale", scale, "--out", out])
            for trial in cli.trials_of_figure(task_class, args, given, name):
                path = trial.folder / trial.task.file
                if path not in seen:
                    seen.add(path)
                    changed += migrate(trial.task)
    left = {*Path(out).rglob("result.json"), *Path(out).rglob("stability.json")} - seen
    for path in left:  # sorting's search for a learning rate
        _, *words = files.read_json(path)["argv"]  # after the script's name
        changed += migrate(cli.parse_task(Sort, [*words, "--out", out]))
    print(f"{changed} of {len(seen | left)} files changed")


if __name__ == "__main__":
    main(sys.argv[1])
