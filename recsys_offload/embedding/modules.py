"""Collections of embedding tables in host memory, with the interface of TorchRec's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys_offload.embedding.collection import HostCollection
from recsys_offload.embedding.config import CacheSettings, InvalidIds, Placement, SparseOptimizerSettings
from recsys_offload.embedding.plan import feature_ids
from recsys_offload.embedding.request import Request


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
        placements: Mapping[str, Placement] | None = None,
        cache: CacheSettings | None = None,
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
            device: where the output goes, and where the cache is; by default the host.
            placements: table -> ``device`` (all rows there), ``cached`` (hot rows there) or ``host`` (looked up on the
                host); ``host`` where it is not named.
            cache: its size, and how rows get there.

        Raises:
            ValueError: a table's description is wrong.
            MemoryError: the tables do not fit in host memory, or not in ``memory_limit``.
        """
        self._names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._lengths = [config.embedding_dim for config in tables for _ in config.feature_names or [config.name]]
        self._is_weighted = is_weighted
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
            placements=placements,
            cache=cache,
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools each bag of ``features``.

        Raises:
            InvalidIdError: an id has no row, and ``invalid_ids`` is ``error``.
            KeyError: a feature is missing.
            ValueError: the ids are no integers, or lack the weights that the collection needs.
        """
        _, (output,) = self._look_up(features)
        return KeyedTensor(self._names, self._lengths, output)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    def _read_parts(self, request: Request) -> list[Tensor]:
        size = (request.ids.batch_size, sum(self._lengths))
        on_host = [group.placement == "host" for group in self.tables.groups]
        output = self._new_output(*size, on_host=all(on_host))
        if any(on_host) and not all(on_host) and self._device.type != "cpu":
            # The host's columns go to the device together; the columns of the others are written there after that.
            host_output = self._new_output(*size, on_host=True)
            self._read_groups(request, host_output, on_host=True)
            output.copy_(host_output, non_blocking=True)
            self._read_groups(request, output, on_host=False)
        else:
            self._read_groups(request, output, on_host=True)
            self._read_groups(request, output, on_host=False)
        return [output.to(self._device)]

    def _read_groups(self, request: Request, output: Tensor, *, on_host: bool) -> None:
        for group, lookup, part in zip(self.tables.groups, self._lookups, request.parts, strict=True):
            if (group.placement == "host") == on_host:
                self._compute(group, partial(lookup.pooled, request, part, output))

    def _group_gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        (gradient,) = gradients
        host_gradient = gradient.cpu() if any(group.placement == "host" for group in self.tables.groups) else gradient
        return [host_gradient if group.placement == "host" else gradient for group in self.tables.groups]


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
        placements: Mapping[str, Placement] | None = None,
        cache: CacheSettings | None = None,
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
            placements=placements,
            cache=cache,
        )
        self._names_by_table = dict(zip(self.tables.names, get_embedding_names_by_table(tables), strict=True))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up the row of every id; raises as ``HostEmbeddingBagCollection.forward``."""
        request, outputs = self._look_up(features)
        result: dict[str, JaggedTensor] = {}
        for part, vectors in zip(request.parts, outputs, strict=True):
            group_features = part.features
            first_id = feature_ids(group_features, request.ids).tolist()
            names = [name for table in dict.fromkeys(group_features.tables) for name in self._names_by_table[table]]
            for index, (name, feature) in enumerate(zip(names, group_features.names, strict=True)):
                jagged = features[feature]
                result[name] = JaggedTensor(
                    vectors[first_id[index] : first_id[index + 1]], lengths=jagged.lengths().to(self._device)
                )
        return result

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def _read_parts(self, request: Request) -> list[Tensor]:
        outputs = []
        for group, lookup, part in zip(self.tables.groups, self._lookups, request.parts, strict=True):
            ids = int(feature_ids(part.features, request.ids)[-1])
            output = self._new_output(ids, group.dim, on_host=group.placement == "host")
            self._compute(group, partial(lookup.rows, request, part, output))
            outputs.append(output.to(self._device))
        return outputs

    def _group_gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        return [
            gradient.cpu() if group.placement == "host" else gradient
            for group, gradient in zip(self.tables.groups, gradients, strict=True)
        ]


def host_collections(model: nn.Module) -> dict[str, HostCollection]:
    """The collections over host tables inside a model: module path -> collection."""
    return {path: module for path, module in model.named_modules() if isinstance(module, HostCollection)}
