"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from recsys_offload.cache_report import CacheReport
from recsys_offload.checkpoint import latest_checkpoint, load_checkpoint, load_weights, save_checkpoint
from recsys_offload.data import Batch, Encoding, ParquetBatches
from recsys_offload.dense_optimizer import build_dense_optimizer
from recsys_offload.device import choose_device, make_repeatable
from recsys_offload.early_stopping import EarlyStopping
from recsys_offload.embedding import host_collections, prefetch
from recsys_offload.embedding.uses import count_uses
from recsys_offload.faults import NonFiniteLossError, describe_fault, naming_batch
from recsys_offload.metrics import METRICS, evaluate_batches
from recsys_offload.models import build_model, table_configs
from recsys_offload.progress import TrainingProgress
from recsys_offload.run_folder import RunFolder
from recsys_offload.schedules import build_schedule
from recsys_offload.stop_request import StopRequest, StopRequested
from recsys_offload.summary import Summary

__all__ = ["Trainer"]

# Batches whose ids are counted before placements are chosen.
BATCHES_COUNTED = 100


@dataclass
class TrainingState:
    """What the loop itself remembers; part of every checkpoint.

    Attributes:
        step: steps that are done.
        epoch: epochs that are done.
        epoch_end: the step at which the last of them ended.
        evaluated_step: the step of the last evaluation.
        loss_sum: the sum of the losses of the ``loss_steps`` steps since the last log entry.
        examples: training examples seen, repeated ones included.
        seconds: time spent training, evaluating and saving.
        stopping: the best evaluation so far.
    """

    stopping: EarlyStopping
    step: int = 0
    epoch: int = 0
    epoch_end: int = 0
    evaluated_step: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    examples: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains one model as ``run.config`` says, going on from the newest checkpoint in the run folder."""

    def __init__(self, run: RunFolder, console: Console) -> None:
        """Read the data's encoding, build the model, and load the newest checkpoint, if there is one.

        Raises:
            ValueError: the settings, the data or the checkpoint cannot be used; the message says why.
        """
        self.config = config = run.config
        self.run = run
        self.console = console
        self.device = choose_device(config.train.device)
        make_repeatable(config.run.seed, config.train.deterministic)
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        checkpoint = latest_checkpoint(run.checkpoints)
        if checkpoint is None:
            self.encoding = Encoding.fit(config.data)
            self.encoding.save(run.encoding)
        else:
            self.encoding = Encoding.load(run.encoding)
        self.train_batches = ParquetBatches(
            config.data, self.encoding, "train", config.train.batch_size, seed=config.run.seed, shuffle=True
        )
        self.validation_batches = self._evaluation_batches("validation")
        self.test_batches = self._evaluation_batches("test")

        uses = self._count_uses()
        self.model = build_model(config.model, config.data, config.embedding, config.run.seed, self.device, uses)
        collections = host_collections(self.model)
        self.prefetched = prefetch(self.train_batches, self.model, config.embedding.look_ahead)
        self.cache_report = CacheReport(
            list(collections.values()), self.prefetched, run.path, config.logging.trace_steps
        )
        self.parameters = list(self.model.parameters())
        self.dense_optimizer = build_dense_optimizer(config.dense_optimizer, self.parameters)
        self.optimizers = {"dense": self.dense_optimizer} | {
            f"sparse.{path}": collection.optimizer for path, collection in collections.items()
        }
        self.schedulers = {
            name: build_schedule(
                optimizer, config.schedules.dense if name == "dense" else config.schedules.sparse, self._total_steps()
            )
            for name, optimizer in self.optimizers.items()
        }
        self.state = TrainingState(EarlyStopping(config.train.monitor, config.train.patience))
        self._saved: tuple[int, int, int] | None = None
        if checkpoint is not None:
            self._resume(checkpoint)
        if uses is not None and config.embedding.cache.warm_start:  # of the rows as the checkpoint has them
            for collection in collections.values():
                collection.warm(uses)

    def train(self) -> Summary:
        """Train until the end, then evaluate the best checkpoint on the test part.

        Raises:
            StopRequested: the user interrupted; a checkpoint of the last step has been saved.
            NonFiniteLossError: the loss is not finite; the message says where and why.
        """
        self.run.start_logs(self.state.step)
        self.progress = TrainingProgress(
            self.console,
            step=self.state.step,
            total_steps=self._total_steps(),
            plain_interval_seconds=self.config.logging.plain_interval_seconds,
        )
        self._started = time.perf_counter() - self.state.seconds
        with StopRequest() as self.stop, self.progress:
            try:
                self._at_step_boundary()  # an interrupted run may owe an evaluation
                while self._reason_to_end() is None:
                    self._train_epoch()
                return self._finish()
            except StopRequested:
                self._save()
                raise
            finally:
                self.prefetched.close()
                self.train_batches.close()
                self.cache_report.write_trace()

    def _train_epoch(self) -> None:
        """Train to the end of the epoch that the batches are in, or to the end of the run."""
        self.model.train()
        for batch in self.prefetched:
            with naming_batch(batch):
                self._train_step(batch)
            self._at_step_boundary()
            if self._reason_to_end() is not None:
                return
        self.state.epoch += 1
        self.state.epoch_end = self.state.step
        self._at_step_boundary()

    def _train_step(self, batch: Batch) -> None:
        batch = batch.to(self.device, non_blocking=True)
        logits = self.model(batch.dense, batch.sparse)
        loss = weighted_loss(logits, batch)
        loss_value = loss.item()
        if not math.isfinite(loss_value):  # seen before the backward pass would spread it into the tables
            names = list(self.config.data.dense)
            raise NonFiniteLossError(describe_fault(self.model, batch, names, self.state.step + 1, loss_value))
        self.dense_optimizer.zero_grad()
        loss.backward()  # updates the tables, too
        if self.config.train.gradient_clipping is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.train.gradient_clipping)
        for optimizer in self.optimizers.values():
            optimizer.step()
        rates = {
            f"{name.partition('.')[0]}_learning_rate": float(scheduler.get_last_lr()[0])
            for name, scheduler in self.schedulers.items()
        }
        for scheduler in self.schedulers.values():
            scheduler.step()
        self._count(len(batch), loss_value, rates)

    def _count(self, examples: int, loss: float, rates: dict[str, float]) -> None:
        state = self.state
        state.step += 1
        state.examples += examples
        state.loss_sum += loss
        state.loss_steps += 1
        mean_loss = state.loss_sum / state.loss_steps
        self.progress.update(
            step=state.step, epoch=state.epoch + 1, loss=mean_loss, samples=examples, remark=self.cache_report.text
        )
        self.cache_report.after_step()
        if state.step % self.config.logging.interval_steps == 0:
            rate = self.progress.throughput.samples_per_second
            values = {"epoch": state.epoch + 1, "loss": mean_loss, **rates, "samples_per_second": rate}
            values.update(self.cache_report.values())
            self.run.log("train", state.step, values)
            state.loss_sum, state.loss_steps = 0.0, 0

    def _at_step_boundary(self) -> None:
        """Everything that happens between two steps: stopping, evaluating, saving."""
        self.stop.raise_if_requested()
        interval = self.config.checkpoint.interval_steps
        if self._evaluation_is_due():
            self._evaluate()
            self._save()
        elif interval is not None and self.state.step and self.state.step % interval == 0:
            self._save()

    def _evaluation_is_due(self) -> bool:
        step, interval = self.state.step, self.config.train.evaluation_interval_steps
        if self.validation_batches is None or step == self.state.evaluated_step:
            return False
        return step == self.state.epoch_end if interval is None else step % interval == 0

    def _evaluate(self) -> None:
        """Evaluate on the validation part."""
        assert self.validation_batches is not None
        with self.progress.during("evaluating"):
            metrics = evaluate_batches(
                self.model, self.validation_batches, self.device, at_each_batch=self.stop.raise_if_requested
            )
        self.state.evaluated_step = self.state.step
        is_best = self.state.stopping.update(self.state.step, metrics)
        self.run.log("validation", self.state.step, metrics)
        text = "  ".join(f"{name.replace('_', ' ')} {metrics[name]:.5f}" for name in METRICS)
        self.progress.message(f"validation at step {self.state.step:,}: {text}{'  (best)' if is_best else ''}")

    def _save(self) -> None:
        """Save a checkpoint of the state as it is, unless that is what the newest one holds."""
        state = self.state
        state.seconds = time.perf_counter() - self._started
        now = (state.step, state.epoch, state.evaluated_step)
        if self._saved == now:
            return
        best = state.stopping.best_step
        with self.progress.during("saving a checkpoint"):
            save_checkpoint(
                self.run.checkpoints,
                step=state.step,
                model=self.model,
                dense_optimizer=self.dense_optimizer,
                schedulers=self.schedulers,
                data=self.prefetched.state_dict(),
                trainer=asdict(state),
                keep=self.config.checkpoint.keep,
                protect=[] if best is None else [self._checkpoint_path(best)],
            )
        self._saved = now

    def _resume(self, checkpoint: Path) -> None:
        resumed = load_checkpoint(
            checkpoint,
            model=self.model,
            dense_optimizer=self.dense_optimizer,
            schedulers=self.schedulers,
            verify=False,  # `latest_checkpoint` has verified it
        )
        self.train_batches.load_state_dict(resumed.data)
        stopping = EarlyStopping(**{**resumed.trainer["stopping"], "patience": self.config.train.patience})
        self.state = state = TrainingState(**{**resumed.trainer, "stopping": stopping})
        self._saved = (state.step, state.epoch, state.evaluated_step)
        self.console.print(f"Going on from {checkpoint}.", highlight=False, markup=False, soft_wrap=True)

    def _reason_to_end(self) -> str | None:
        train = self.config.train
        if train.epochs is not None and self.state.epoch >= train.epochs:
            return "All epochs done"
        if train.steps is not None and self.state.step >= train.steps:
            return "All steps done"
        if self.state.stopping.should_stop:
            return f"No better {train.monitor} in {train.patience} evaluations"
        return None

    def _finish(self) -> Summary:
        """Evaluate the best checkpoint on the test part."""
        state = self.state
        if self.validation_batches is not None and state.evaluated_step != state.step:
            self._evaluate()
        self._save()
        best = state.stopping.best_step
        path = self._checkpoint_path(state.step if best is None else best)
        test = None
        if self.test_batches is not None:
            load_weights(path, self.model)
            with self.progress.during("testing"):
                test = evaluate_batches(
                    self.model, self.test_batches, self.device, at_each_batch=self.stop.raise_if_requested
                )
            self.run.log("test", state.step if best is None else best, test)
        return Summary(
            reason=self._reason_to_end() or "",
            steps=state.step,
            epochs=state.epoch,
            best_step=best,
            best_checkpoint=str(path.relative_to(self.run.path)),
            validation=state.stopping.best_metrics,
            test=test,
            training_seconds=state.seconds,
            examples=state.examples,
            cache=self.cache_report.totals(),
        )

    def _count_uses(self) -> dict[str, np.ndarray] | None:
        """How often the rows are used, where the settings need to know: in some batches, or for a warm start in all."""
        embedding = self.config.embedding
        automatic = "auto" in (embedding.placement, *embedding.placements.values())
        if not automatic and not embedding.cache.warm_start:
            return None
        tables = table_configs(self.config.data, self.config.model.embedding_dim)
        batches = ParquetBatches(
            self.config.data, self.encoding, "train", self.config.train.batch_size, require_label=False
        )
        try:
            chosen = batches if embedding.cache.warm_start else islice(batches, BATCHES_COUNTED)
            return count_uses((batch.sparse for batch in chosen), tables)
        finally:
            batches.close()

    def _evaluation_batches(self, part: Literal["validation", "test"]) -> ParquetBatches | None:
        """The batches of a part, in the order of the files; None where the data has no such part."""
        if not self.encoding.rows.get(part):
            return None
        batch_size = self.config.train.evaluation_batch_size or self.config.train.batch_size
        return ParquetBatches(self.config.data, self.encoding, part, batch_size)

    def _total_steps(self) -> int:
        """The steps of the whole run."""
        train = self.config.train
        by_epochs = None if train.epochs is None else train.epochs * self.train_batches.steps_per_epoch
        return min(count for count in (by_epochs, train.steps) if count is not None)

    def _checkpoint_path(self, step: int) -> Path:
        return self.run.checkpoints / f"step-{step:09d}"


def weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over the batch of weight times cross entropy, as torch's ``weight=`` defines it."""
    return functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels, weight=batch.weights)
