"""A collection with every table resident, in plain torch: what host tables are compared to."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding import HostEmbeddingBagCollection, SparseOptimizerSettings
from recsys_offload.embedding.kernels import reference
from recsys_offload.embedding.optimizers import CODES, update_parameters


class ReferenceBagCollection:
    """Starts from the rows of a host collection, and is trained the same way by the oracle's arithmetic."""

    def __init__(self, host: HostEmbeddingBagCollection, optimizer: SparseOptimizerSettings) -> None:
        self.configs: list[EmbeddingBagConfig] = host.embedding_bag_configs()
        self.optimizer = optimizer
        self.step = host.tables.step
        self.weights = {config.name: host.tables.weight(config.name).clone() for config in self.configs}
        self.state = {
            config.name: {key: value.clone() for key, value in host.tables.optimizer_state(config.name).items()}
            for config in self.configs
        }

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """The pooled output, float32 ``[B, D]``."""
        columns = []
        for config in self.configs:
            for feature in config.feature_names:
                jagged = features[feature]
                mean = config.pooling == PoolingType.MEAN
                columns.append(
                    reference.lookup_pooled(
                        self.weights[config.name], jagged.values(), jagged.offsets(), mean, jagged.weights_or_none()
                    )
                )
        return torch.cat(columns, dim=1)

    def backward(self, features: KeyedJaggedTensor, gradient: Tensor, learning_rate: float) -> None:
        """Updates the tables for the gradient of the pooled output."""
        self.step += 1
        parameters = torch.from_numpy(update_parameters(self.optimizer, learning_rate, self.step))
        column = 0
        for config in self.configs:
            rows, gradients = [], []
            for feature in config.feature_names:
                jagged = features[feature]
                part = gradient[:, column : column + config.embedding_dim]
                column += config.embedding_dim
                rows.append(jagged.values())
                mean = config.pooling == PoolingType.MEAN
                gradients.append(reference.id_gradients(part, jagged.offsets(), mean, jagged.weights_or_none()))
            distinct, summed = reference.sum_by_row(torch.cat(rows), torch.cat(gradients))
            reference.update(
                CODES[self.optimizer.name],
                parameters,
                self.weights[config.name],
                self.state[config.name],
                distinct,
                summed,
            )

    def assert_equal(self, host: HostEmbeddingBagCollection) -> None:
        """Every weight and every state value is the same to the bit."""
        for config in self.configs:
            assert torch.equal(host.tables.weight(config.name), self.weights[config.name]), config.name
            for key, value in host.tables.optimizer_state(config.name).items():
                assert torch.equal(value, self.state[config.name][key]), f"{config.name}.{key}"
        assert host.tables.step == self.step
