"""What a plan lets each rank send and receive, counted."""

from __future__ import annotations

from rolemesh.engine.weights.plan import Plan


def planned_received(plan: Plan, rank: int) -> int:
    """Bytes that a rank receives in all rounds."""
    copies = (copy for bucket in plan.buckets for copy in bucket.copies if copy.target == rank)
    return sum(map(plan.wire_bytes, copies))


def planned_sent(plan: Plan, rank: int) -> int:
    """Bytes that a rank sends in all rounds."""
    copies = (copy for bucket in plan.buckets for copy in bucket.copies if copy.source == rank)
    return sum(map(plan.wire_bytes, copies))
