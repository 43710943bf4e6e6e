"""Training loop, checkpoints and evaluation of one trial.

Each batch is a function of (seed, iteration), so a resumed run gives the same result as an
uninterrupted one, bit for bit on CPUs. README.md shows how to load a trained model.
"""

import sys
import time
from datetime import UTC, datetime

import torch

import common
from suite import files, graphs, interrupts, machine
from suite.files import FAILED, NOT_FINITE, Exit
from suite.progress import ProgressLine, format_time_left


def train(task):
    """Train and evaluate a trial, from its last checkpoint if any; return the exit code."""
    if files.can_skip(task):
        print(f"{task.folder} is already finished (--overwrite retrains, --evaluate re-tests)")
        return files.print_result(task)
    device = machine.choose_device(task.args)
    engine = machine.choose_engine(task.args, device)
    machine.set_torch_options(engine, device, task.args.hidden)
    if device.type == "cuda":  # the default stream cannot capture CUDA graphs
        torch.cuda.set_stream(torch.cuda.Stream())
    task.prepare_data(device)
    trainer = Trainer(task, device, engine)
    with files.lock(task.folder):
        trainer.setup()
        if not task.args.evaluate:
            # After a signal, the process exits at the end of this block
            with interrupts.deferred():
                trainer.loop()
        trainer.finish()
    print(f"results in {task.folder}")
    return files.print_result(task)


class Trainer:
    """Training state of a trial: model, optimizer, running sums and files."""

    def __init__(self, task, device, engine):
        """Initialise the state; weights are drawn on the CPU."""
        self.task, self.args, self.folder = task, task.args, task.folder
        self.device, self.engine = device, engine
        torch.manual_seed(task.seed)
        self.model = task.make_model().to(device)
        self.learning_rate = torch.zeros((), device=device)  # Adam reads it, loop() sets it
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=self.learning_rate,
            betas=(self.args.beta1, self.args.beta2),
            eps=self.args.eps,
            fused=True,
            capturable=engine.graph,
        )
        self.sums = {  # since the last row of self.curve
            name: torch.zeros((), dtype=torch.float64, device=device)
            for name in ("loss", "accuracy")
        }
        self.iteration, self.seconds, self.curve = 0, 0.0, []
        self.rng_modules = [torch, torch.cuda] if device.type == "cuda" else [torch]
        self.process_info = {  # config and provenance of this process
            "task": task.name,
            "config": task.config,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **machine.provenance(engine, device),
        }
        # "earlier" in result.json; "processes" in last.pt, with this one
        self.earlier_processes = []

    def loop(self):
        """Train until the last iteration or a signal, and save."""
        args, line = self.args, ProgressLine()
        started = time.perf_counter() - self.seconds
        try:
            for i in range(self.iteration + 1, args.iterations + 1):
                self.learning_rate.fill_(self.task.learning_rate(i))
                self.step(i)
                self.iteration, self.seconds = i, time.perf_counter() - started

                last = i == args.iterations
                should_log = last or i % args.log_every == 0
                if line.is_terminal:
                    line.update(self.format_progress)
                elif should_log:  # in log files, one line for each row of curve.csv
                    print(self.format_progress())
                if should_log:
                    self.log()
                if args.snapshot_every and (last or i % args.snapshot_every == 0):
                    self.save_snapshot()
                stopping = last or interrupts.requested
                if stopping or i % args.save_every == 0:
                    self.save()
                if stopping:
                    break
        finally:
            line.clear()
        state = "finished" if self.iteration == args.iterations else "interrupted"
        print(f"training {state}; checkpoint saved at iteration {self.iteration}")

    # -- training step

    def train_on(self, batch):
        """Take a step and add to the sums; no synchronisation, as CUDA graphs require."""
        loss_and_grad_ = graphs.maybe_compile(common.loss_and_grad_, self.engine.compiled)
        loss, accuracy = common.train_step(
            self.model,
            self.engine.features,
            batch,
            self.optimizer,
            self.args.clip,
            loss_and_grad_,
        )
        self.sums["loss"] += loss
        self.sums["accuracy"] += accuracy

    def build_step(self):
        """Set self.step(i), which runs iteration i eagerly or as a CUDA graph."""
        training_batch, train_on = self.task.training_batch, self.train_on
        if self.engine.graph and self.task.batch_in_graph:
            if self.engine.compiled:  # fuse a hundred small kernels
                training_batch = torch.compile(training_batch, dynamic=False)
            replay = graphs.make_replay(
                lambda inputs: train_on(training_batch(*inputs)), self.mutable_tensors
            )
            iteration = torch.zeros((), dtype=torch.int64, device=self.device)
            self.step = lambda i: replay([iteration.fill_(i)])
            return
        if self.engine.graph:
            train_on = graphs.make_replay(train_on, self.mutable_tensors)
        self.step = lambda i: train_on(training_batch(i))

    def mutable_tensors(self):
        """Return the tensors that a training step changes."""
        optimizer_state = [x for state in self.optimizer.state.values() for x in state.values()]
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *optimizer_state,
            *self.sums.values(),
        ]

    # -- setup, checkpoints and results

    def setup(self):
        """Prepare the folder, load the last checkpoint, if any, and build the step."""
        if self.args.overwrite:
            files.clear(self.folder)
        if self.args.snapshot_every:
            (self.folder / "snapshots").mkdir(exist_ok=True)
        self.load_checkpoint()
        files.write_json(self.folder / "config.json", self.process_info)
        summary = (
            f"{self.process_info['parameters']:,} parameters on {self.process_info['device']}"
        )
        start = "training from scratch"
        if self.args.evaluate:
            start = "evaluating"
        elif self.iteration:
            start = f"resuming after iteration {self.iteration}"
        print(f"{self.folder}: {summary}, {start}")
        self.build_step()

    def load_checkpoint(self):
        """Load last.pt or, if damaged, previous.pt; both lead to the same result."""
        for name in "last.pt", "previous.pt":
            path = self.folder / name
            try:
                if path.exists():
                    saved = files.load(path, self.device)
                    with files.prefix_errors(path):
                        self.restore(saved)
                    return
            except files.Corrupt as error:
                _, message = error.args
                print(f"{message}; ignoring it", file=sys.stderr)
                if not self.args.evaluate:
                    path.unlink()  # else the next save would keep it as previous.pt

    def restore(self, saved):
        """Restore the state from a checkpoint's content."""
        files.require_same_trial(saved["processes"][-1], self.task)
        if saved["iteration"] not in range(self.args.iterations + 1):
            raise ValueError(f"iteration {saved['iteration']} is out of range")
        self.model.load_state_dict(saved["model"])
        # Keep our param groups: the saved ones hold another learning-rate tensor
        param_groups = self.optimizer.param_groups
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups = param_groups
        for name, x in self.sums.items():
            x.copy_(saved["sums"][name])
        self.iteration, self.seconds = saved["iteration"], saved["seconds"]
        self.curve, self.earlier_processes = saved["rows"], saved["processes"]
        for module, state in zip(self.rng_modules, saved["rng_states"]):
            module.set_rng_state(state.cpu())

    def save(self):
        """Write curve.csv and last.pt; the old last.pt becomes previous.pt."""
        self.require_finite()
        content = {
            "iteration": self.iteration,
            "seconds": self.seconds,
            "sums": self.sums,
            "rows": self.curve,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng_states": [module.get_rng_state() for module in self.rng_modules],
            "processes": [
                *self.earlier_processes,
                self.process_info | {"until": self.iteration},
            ],
        }
        rows = [("iteration", "loss", "accuracy", "learning_rate", "seconds"), *self.curve]
        text = "".join(f"{','.join(map(str, row))}\n" for row in rows)
        files.write(self.folder / "curve.csv", text.encode())
        files.save(self.folder / "last.pt", content, keep_as=self.folder / "previous.pt")

    def save_snapshot(self):
        self.require_finite()
        path = self.folder / "snapshots" / f"{self.iteration:06d}.pt"
        files.save(path, {"config": self.task.config, "model": self.model.state_dict()})

    def require_finite(self):
        tensors = [*self.sums.values(), *self.model.parameters()]
        if not torch.stack([x.isfinite().all() for x in tensors]).all():
            what = f"loss or weights are not finite at iteration {self.iteration}"
            raise Exit(NOT_FINITE, f"training diverged: {what}; try a lower --lr")

    def log(self):
        """Add means since the last row to the curve; write progress.json, which --all reads."""
        self.require_finite()
        loss, accuracy = self.means()
        for x in self.sums.values():
            x.zero_()
        lr = self.task.learning_rate(self.iteration)
        self.curve.append([self.iteration, loss, accuracy, lr, round(self.seconds, 3)])
        fraction = self.iteration / self.args.iterations
        progress = dict(fraction=fraction, accuracy=accuracy, duration=self.seconds / fraction)
        files.write_json(self.folder / "progress.json", progress, durable=False)

    def means(self):
        """Return mean loss and accuracy since the last row of self.curve."""
        start = self.curve[-1][0] if self.curve else 0
        return [x.item() / (self.iteration - start) for x in self.sums.values()]

    def format_progress(self):
        """Return a progress line; synchronises host and device."""
        i, iterations = self.iteration, self.args.iterations
        loss, accuracy = self.means()
        left = format_time_left((iterations / i - 1) * self.seconds)
        metrics = f"train accuracy {accuracy:.3f}  loss {loss:.3f}"
        speed = f"{i}/{iterations}, {i / self.seconds:.3g} it/s"
        return f"{100 * i // iterations:3}%  {left}  {metrics}  {speed}"

    def finish(self):
        """Evaluate, write result.json, and delete files that only unfinished trials need."""
        # Happens only with --evaluate and no intact last.pt
        if self.iteration < self.args.iterations:
            message = f"{self.folder} has no checkpoint of its last iteration"
            raise Exit(FAILED, f"{message}: rerun with --overwrite, not --evaluate")
        self.model.eval()
        process_info, earlier_processes = self.process_info, self.earlier_processes
        if self.args.evaluate:  # keep the provenance of training
            *earlier_processes, trained = self.earlier_processes
            process_info = trained | {"evaluated": self.process_info}
        result = process_info | {
            "earlier": earlier_processes,
            "metrics": self.task.evaluate(self.model, self.engine),
            "examples": self.task.examples(self.model, self.engine),
            "iterations": self.iteration,
            "seconds": round(self.seconds, 3),
            "peak_memory_bytes": machine.peak_memory(self.device),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        files.write_json(self.folder / "result.json", result)
        for name in "previous.pt", "progress.json":
            (self.folder / name).unlink(missing_ok=True)
