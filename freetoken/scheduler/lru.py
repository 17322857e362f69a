"""The leaves that may be evicted, least recently used first: a heap with lazy deletion.

An entry counts only while its node is still an unlocked leaf, last used when the entry was made.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from freetoken.scheduler.node import Node

_Entry = tuple[int, int, Node]


class LeafQueue:
    def __init__(self) -> None:
        self._heap: list[_Entry] = []

    def push(self, node: Node, num_nodes: int) -> None:
        """Offer an unlocked leaf; `num_nodes` of the tree bound the stale entries kept."""
        heappush(self._heap, (node.used_at, node.uid, node))
        if len(self._heap) > 64 + 4 * num_nodes:
            live = {entry[1]: entry for entry in self._heap if _is_live(entry)}
            self._heap = list(live.values())
            heapify(self._heap)

    def pop(self) -> Node | None:
        while self._heap:
            entry = heappop(self._heap)
            if _is_live(entry):
                return entry[2]
        return None

    def holds(self, node: Node) -> bool:
        """For checks: a scan."""
        return any(entry[2] is node and _is_live(entry) for entry in self._heap)


def _is_live(entry: _Entry) -> bool:
    node = entry[2]
    return node.is_evictable and node.used_at == entry[0]
