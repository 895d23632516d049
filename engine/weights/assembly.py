"""The assembly of a rank's tensors from boxes of parameters, wherever the boxes come from.

Every executor of a plan uses it: the transfer between ranks, published weights, checkpoints and the
export. An executor only says which box has arrived, and with which values.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from rolemesh.engine.layout.manifest import Piece, WeightLayout, num_elements
from rolemesh.engine.weights.copies import Copy
from rolemesh.engine.weights.sharded_tensors import part, place, tensor_dtypes


class Assembly:
    """One rank's tensors of a layout while their boxes arrive. Owned by one thread.

    A tensor is allocated when its first box arrives and handed over when its last one has. What no
    box covers (the padded rows of a vocabulary) is 0.

    Invariant: every box arrives once, by `put` or by `arrived`. A rank that needs a box in two
    tensors (`duplicates`) gets it for the first one; the second one copies it when the first is
    whole.

    Example, of a tensor of 4 rows that arrives in two boxes::

        assembly = Assembly(layout, rank)
        assembly.put(Piece("norm", ((0, 3),), "norm", (0,)), first_rows)
        list(assembly.whole())  # []
        assembly.put(Piece("norm", ((3, 4),), "norm", (3,)), last_row)
        list(assembly.whole())  # [("norm", tensor of 4 rows)]
    """

    def __init__(
        self,
        layout: WeightLayout,
        rank: int,
        *,
        device: torch.device | str = "cpu",
        own: Sequence[Copy] = (),
        tensors: Mapping[str, torch.Tensor] | None = None,
        duplicates: Sequence[Copy] = (),
    ) -> None:
        """Counts what has to arrive. Tensors for which nothing has to arrive are whole at once.

        Args:
            layout: Of the tensors to make.
            rank: Whose part of it.
            device: On which the tensors are made.
            own: Copies of boxes that the rank holds already; they are made when a tensor is begun.
            tensors: The sources of `own`, floating, by name.
            duplicates: Copies between two tensors of this assembly, as `Plan.duplicates`.

        Raises:
            ManifestError: A tensor would hold two element types.
        """
        shard = layout.shard(rank)
        self._shapes = shard.shapes
        self._dtypes = tensor_dtypes(layout, rank)
        self._device = device
        self._tensors = tensors or {}
        self._own: defaultdict[str, list[Copy]] = defaultdict(list)
        self._duplicates: defaultdict[str, list[Copy]] = defaultdict(list)
        covered = dict.fromkeys(shard.shapes, 0)
        for piece in shard.pieces:
            covered[piece.tensor] += num_elements(piece.box)
        self._is_padded = {
            name: covered[name] < torch.Size(shape).numel() for name, shape in shard.shapes.items()
        }
        self._awaited = covered
        for copy in own:
            self._own[copy.target_tensor].append(copy)
            self._awaited[copy.target_tensor] -= num_elements(copy.box)
        for copy in duplicates:
            self._duplicates[copy.source_tensor].append(copy)
        self._begun: dict[str, torch.Tensor] = {}
        self._whole = deque(name for name, awaited in self._awaited.items() if not awaited)

    def begin(self, name: str) -> torch.Tensor:
        """The tensor while it is being filled; allocated, with the rank's own boxes, if it is new.

        Call it early to make these copies while a box is still on its way.
        """
        if name not in self._begun:
            make = torch.zeros if self._is_padded[name] else torch.empty
            tensor = make(tuple(self._shapes[name]), dtype=self._dtypes[name], device=self._device)
            for copy in self._own[name]:
                held = part(self._tensors[copy.source_tensor], copy.source_origin, copy.box)
                place(tensor, copy.wanted, held)
            self._begun[name] = tensor
        return self._begun[name]

    def put(self, piece: Piece, values: torch.Tensor, *, is_lasting: bool = False) -> None:
        """Writes a box that arrived to its place.

        Args:
            piece: Which box, and where it belongs.
            values: Floating, shaped as the box, on any device.
            is_lasting: Whether the memory of `values` stays as it is. A tensor that is one box then
                is `values` itself, without a copy.
        """
        name = piece.tensor
        is_all = name not in self._begun and tuple(values.shape) == tuple(self._shapes[name])
        if is_lasting and is_all and values.dtype == self._dtypes[name]:
            self._begun[name] = values
        else:
            place(self.begin(name), piece, values)
        self.arrived(piece, is_lasting=is_lasting)

    def arrived(self, piece: Piece, *, is_lasting: bool = False) -> None:
        """Says that a box lies in its place: by `put`, or received into the tensor of `begin`."""
        name = piece.tensor
        self._awaited[name] -= num_elements(piece.box)
        if self._awaited[name]:
            return
        for copy in self._duplicates[name]:
            again = part(self._begun[name], copy.source_origin, copy.box)
            self.put(copy.wanted, again, is_lasting=is_lasting)
        self._whole.append(name)

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that are whole by now, by name; they are no longer held here."""
        while self._whole:
            name = self._whole.popleft()
            self.begin(name)
            yield name, self._begun.pop(name)
