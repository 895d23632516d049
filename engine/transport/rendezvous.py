"""Rendezvous before a transport works: the ranks exchange small blobs, one from each rank.

A transport makes an `offer` and connects with the offers of all ranks. How they travel is free:
over the mesh of the ranks (`selection.make_transport`), or by an authenticated RPC.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_OFFER_BYTES = 4096
"""Bound of what a peer may say about itself."""


class OfferInvalidError(ValueError):
    """What a peer says about itself cannot be used: names the rank and what was wrong."""


def encode_offer(kind: str, fields: Mapping[str, str | int]) -> bytes:
    """An offer as JSON."""
    return json.dumps({"kind": kind, **fields}, sort_keys=True).encode()


def decode_offer(
    blob: bytes, kind: str, fields: Mapping[str, type[str] | type[int]], *, rank: int
) -> dict[str, Any]:
    """The fields of one rank's offer.

    Raises:
        OfferInvalidError: Too long, no JSON object, of another kind, or other fields.
    """
    if len(blob) > MAX_OFFER_BYTES:
        raise OfferInvalidError(
            f"offer of rank {rank} has {len(blob)} bytes: at most {MAX_OFFER_BYTES} are read"
        )
    try:
        offer = json.loads(blob)
    except ValueError as error:
        raise OfferInvalidError(f"offer of rank {rank} is not JSON: {error}") from error
    if not isinstance(offer, dict) or offer.get("kind") != kind:
        raise OfferInvalidError(
            f"offer of rank {rank} is not of kind {kind!r}: give all ranks the same transport"
        )
    if set(offer) != {"kind", *fields}:
        raise OfferInvalidError(
            f"offer of rank {rank} has fields {sorted(offer)}, not {sorted({'kind', *fields})}: "
            "run the same version of rolemesh on all ranks"
        )
    for name, expected in fields.items():
        if type(offer[name]) is not expected:
            raise OfferInvalidError(
                f"offer of rank {rank}: {name} is {offer[name]!r}: expected {expected.__name__}"
            )
    return {name: offer[name] for name in fields}


def check_offers(offers: Sequence[bytes], world_size: int) -> None:
    """Raises OfferInvalidError unless there is one offer a rank."""
    if len(offers) != world_size:
        raise OfferInvalidError(f"{len(offers)} offers for {world_size} ranks: give one each")
