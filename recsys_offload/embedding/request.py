"""One batch at one collection, from its plan to its update."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_offload.embedding.cache import Ticket
from recsys_offload.embedding.plan import GroupFeatures, Ids, Plan
from recsys_offload.embedding.slots import SlotBatch, Slots


@dataclass
class Part:
    """A batch at one group of tables.

    Attributes:
        features: that read the group.
        plan: the batch's distinct rows; None where they are neither updated nor in slots.
        slots: where the rows are looked up and updated; None for the host's tables themselves.
        batch: the ids as slots, with ``slots``.
    """

    features: GroupFeatures
    plan: Plan | None = None
    slots: Slots | None = None
    batch: SlotBatch | None = None


class Request:
    """A batch's ids, and one part per group of tables."""

    def __init__(self, features: KeyedJaggedTensor, ids: Ids, parts: list[Part]) -> None:
        """Args:
        features: the tensor that was given; the request is found by it.
        ids: its ids.
        parts: one per group, in the groups' order.
        """
        self.features = features
        self.ids = ids
        self.parts = parts
        self.ticket: Ticket | None = None
        self.updates = False
