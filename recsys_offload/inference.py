"""A trained model from its run folder, for evaluation and prediction."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from recsys_offload.checkpoint import latest_checkpoint, load_weights
from recsys_offload.checkpoint_folder import MANIFEST
from recsys_offload.config import Config, read_config
from recsys_offload.data import Encoding
from recsys_offload.models import build_model

__all__ = ["TrainedModel", "load_model"]


@dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, in evaluation mode, and what is needed to feed it.

    Attributes:
        checkpoint: where the weights came from.
        config: the settings of the run.
        encoding: of the run's columns.
        model: on ``device``; its tables on the host, without an optimizer's state.
    """

    checkpoint: Path
    config: Config
    encoding: Encoding
    model: nn.Module
    device: torch.device

    @property
    def batch_size(self) -> int:
        """Examples per batch, as in the run's evaluations."""
        return self.config.train.evaluation_batch_size or self.config.train.batch_size


def load_model(path: Path, device: torch.device) -> TrainedModel:
    """Load the model of a run folder (its best checkpoint, or the newest while there is no best) or of a checkpoint.

    Raises:
        FileNotFoundError: ``path`` is neither, or holds no checkpoint yet.
        ValueError: the settings or the checkpoint are damaged.
    """
    run, checkpoint = _locate(path)
    config = read_config(run / "config.yaml")
    encoding = Encoding.load(run / "encoding")
    # Nothing is trained here: SGD's tables carry no state, and a cache would stay empty.
    optimizer = config.embedding.optimizer.model_copy(update={"name": "sgd"})
    cache = config.embedding.cache.model_copy(update={"sizes": {}})
    embedding = config.embedding.model_copy(
        update={"optimizer": optimizer, "placement": "host", "placements": {}, "cache": cache}
    )
    model = build_model(config.model, config.data, embedding, config.run.seed, device)
    load_weights(checkpoint, model)
    return TrainedModel(checkpoint, config, encoding, model.eval(), device)


def _locate(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that ``path`` means."""
    if (path / MANIFEST).is_file():
        return path.resolve().parent.parent, path
    if not (path / "config.yaml").is_file():
        what = "is neither a run folder (it has no config.yaml) nor a checkpoint (it has no manifest.json)"
        raise FileNotFoundError(f"{path} {what}" if path.exists() else f"there is no run folder or checkpoint '{path}'")
    summary = path / "summary.json"
    if summary.is_file():
        best = path / json.loads(summary.read_text())["best_checkpoint"]
        if best.is_dir():
            return path, best
    newest = latest_checkpoint(path / "checkpoints")
    if newest is None:
        raise FileNotFoundError(f"the run folder {path} holds no checkpoint yet")
    return path, newest
