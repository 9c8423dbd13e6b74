"""Collections of embedding tables in host memory, with the interface of TorchRec's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys_offload.embedding.collection import HostCollection, Request
from recsys_offload.embedding.config import InvalidIds, SparseOptimizerSettings
from recsys_offload.embedding.gradient import RowMajor
from recsys_offload.embedding.kernels.host_lookup import lookup_pooled, lookup_rows
from recsys_offload.embedding.plan import POLICIES, feature_ids, raise_if_invalid


class HostEmbeddingBagCollection(HostCollection):
    """TorchRec's ``EmbeddingBagCollection`` over tables in host memory.

    Takes a ``KeyedJaggedTensor`` on the host and returns a ``KeyedTensor`` float32 ``[B, D]`` on ``device``, D being
    the sum over features of their table's dim. Bags are summed or averaged in the order of their ids; an empty bag
    gives zeros. With per-id weights a mean is the weighted sum divided by the number of ids.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        *,
        optimizer: SparseOptimizerSettings,
        invalid_ids: InvalidIds = "error",
        fallback_row: int = 0,
        seed: int = 0,
        threads: int | None = None,
        memory_limit: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Args:
            tables: TorchRec's description of each table.
            is_weighted: whether the batches carry per-id weights.
            optimizer: that updates the rows of a batch during its backward pass.
            invalid_ids: what an id outside its table means: ``error``, ``modulo`` or ``fallback``.
            fallback_row: the row for such ids, with ``fallback``.
            seed: of the initial values.
            threads: that work on the tables; by default one per core that this process may use.
            memory_limit: bytes of host memory that the tables and their state may take.
            device: where the output goes; by default the host.

        Raises:
            ValueError: a table's description is wrong.
            MemoryError: the tables do not fit in host memory, or not in ``memory_limit``.
        """
        self._names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._lengths = [config.embedding_dim for config in tables for _ in config.feature_names or [config.name]]
        super().__init__(
            tables,
            optimizer=optimizer,
            pooled=True,
            invalid_ids=invalid_ids,
            fallback_row=fallback_row,
            seed=seed,
            threads=threads,
            memory_limit=memory_limit,
            device=device,
        )
        self._is_weighted = is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools each bag of ``features``.

        Raises:
            InvalidIdError: an id has no row, and ``invalid_ids`` is ``error``.
            KeyError: a feature is missing.
            ValueError: the ids are no integers, or lack the weights that the collection needs.
        """
        _, (output,) = self._look_up(features, self._is_weighted)
        return KeyedTensor(self._names, self._lengths, output.to(self._device))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def _read(self, request: Request) -> list[Tensor]:
        ids = request.ids
        output = torch.from_numpy(self._output_memory.take(ids.batch_size, sum(self._lengths)))
        bounds = self._threads.even_bounds(ids.batch_size)
        for group, features in zip(self.tables.groups, request.features, strict=True):
            failures = self._threads.run(
                lookup_pooled,
                bounds,
                group.rows,
                group.dim,
                features.described,
                ids.values,
                ids.offsets,
                ids.weights,
                ids.batch_size,
                POLICIES[self._invalid_ids],
                self._fallback_row,
                output.numpy(),
            )
            raise_if_invalid(failures, features, ids)
        return [output]

    def _group_gradients(self, gradients: list[RowMajor]) -> list[RowMajor]:
        return gradients * len(self.tables.groups)


class HostEmbeddingCollection(HostCollection):
    """TorchRec's ``EmbeddingCollection`` over tables in host memory.

    Takes a ``KeyedJaggedTensor`` on the host and returns, for each feature, a ``JaggedTensor`` on ``device`` whose
    values are the rows of its ids, float32 ``[ids, dim]``.
    """

    table_prefix = "embeddings"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        *,
        optimizer: SparseOptimizerSettings,
        invalid_ids: InvalidIds = "error",
        fallback_row: int = 0,
        seed: int = 0,
        threads: int | None = None,
        memory_limit: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """The arguments and errors are those of ``HostEmbeddingBagCollection``."""
        super().__init__(
            tables,
            optimizer=optimizer,
            pooled=False,
            invalid_ids=invalid_ids,
            fallback_row=fallback_row,
            seed=seed,
            threads=threads,
            memory_limit=memory_limit,
            device=device,
        )
        self._names_by_table = dict(zip(self.tables.names, get_embedding_names_by_table(tables), strict=True))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up the row of every id; raises as ``HostEmbeddingBagCollection.forward``."""
        request, outputs = self._look_up(features, weighted=False)
        result: dict[str, JaggedTensor] = {}
        for group_features, output in zip(request.features, outputs, strict=True):
            first_id = feature_ids(group_features, request.ids).tolist()
            names = [name for table in dict.fromkeys(group_features.tables) for name in self._names_by_table[table]]
            vectors = output.to(self._device)
            for index, (name, feature) in enumerate(zip(names, group_features.names, strict=True)):
                jagged = features[feature]
                result[name] = JaggedTensor(
                    vectors[first_id[index] : first_id[index + 1]], lengths=jagged.lengths().to(self._device)
                )
        return result

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def _read(self, request: Request) -> list[Tensor]:
        ids = request.ids
        bounds = self._threads.even_bounds(ids.batch_size)
        outputs = []
        for group, features in zip(self.tables.groups, request.features, strict=True):
            first_id = feature_ids(features, ids)
            output = torch.from_numpy(self._output_memory.take(int(first_id[-1]), group.dim))
            failures = self._threads.run(
                lookup_rows,
                bounds,
                group.rows,
                group.dim,
                features.described,
                first_id,
                ids.values,
                ids.offsets,
                ids.batch_size,
                POLICIES[self._invalid_ids],
                self._fallback_row,
                output.numpy(),
            )
            raise_if_invalid(failures, features, ids)
            outputs.append(output)
        return outputs

    def _group_gradients(self, gradients: list[RowMajor]) -> list[RowMajor]:
        return gradients


def host_collections(model: nn.Module) -> dict[str, HostCollection]:
    """The collections over host tables inside a model: module path -> collection."""
    return {path: module for path, module in model.named_modules() if isinstance(module, HostCollection)}
