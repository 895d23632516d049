"""Every RPC has its row in the one table: the descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.rpc.policy import (
    Idempotency,
    Policy,
    method_policies,
    method_policy,
    rolemesh_methods,
)

PROTOS = Path(__file__).resolve().parents[3] / "protos" / "rolemesh" / "v1"

WATCHES = ("/rolemesh.v1.CoordinatorService/WatchRun",)


def rpcs_in_proto_files() -> set[str]:
    """Counted in the text, so that a module that is not imported cannot hide its methods."""
    found = set()
    for path in PROTOS.glob("*.proto"):
        service = ""
        for line in path.read_text().splitlines():
            words = line.replace("(", " ").split()
            if words[:1] == ["service"]:
                service = words[1]
            if words[:1] == ["rpc"]:
                found.add(f"/rolemesh.v1.{service}/{words[1]}")
    return found


def test_the_descriptors_hold_every_rpc_of_the_proto_files() -> None:
    assert set(rolemesh_methods()) == rpcs_in_proto_files()
    assert len(rolemesh_methods()) > 20


@pytest.mark.parametrize("full_method", sorted(rolemesh_methods()))
def test_every_rpc_has_a_deadline_and_an_idempotency(full_method: str) -> None:
    policy = method_policy(full_method)
    # A watch lasts as long as what is watched, and work as long as it goes on.
    longest_s = 86_400 if full_method in WATCHES or policy.idle_s else 3_600
    assert 0 < policy.deadline_s <= longest_s
    assert isinstance(policy.idempotency, Idempotency)


@pytest.mark.parametrize("full_method", sorted(rolemesh_methods()))
def test_methods_that_stream_their_progress_and_no_others_have_an_idle_time(
    full_method: str,
) -> None:
    method, idle_s = rolemesh_methods()[full_method], method_policy(full_method).idle_s
    if method.server_streaming and "progress" in method.output_type.fields_by_name:
        assert idle_s is not None
        assert 60 <= idle_s <= 3_600
    else:
        assert idle_s is None


@pytest.mark.parametrize("full_method", sorted(rolemesh_methods()))
def test_every_keyed_rpc_has_a_key(full_method: str) -> None:
    request = rolemesh_methods()[full_method].input_type
    if method_policy(full_method).idempotency is Idempotency.KEYED:
        if "opening" in request.fields_by_name:
            # A stream of requests has it in its first message.
            request = request.fields_by_name["opening"].message_type
        assert request.fields_by_name["key"].message_type.name == "OperationKey"


def test_a_method_without_a_policy_is_refused() -> None:
    assert "/rolemesh.v1.NoService/NoMethod" not in method_policies()
    with pytest.raises(ValueError, match=r"option \(rolemesh.v1.policy\)"):
        method_policy("/rolemesh.v1.NoService/NoMethod")


SEEN_BY_ROLES = {
    "/rolemesh.v1.ExperienceService/Fetch",
    "/rolemesh.v1.WeightsService/GetManifest",
    "/rolemesh.v1.WeightsService/GetChecksums",
    "/rolemesh.v1.WeightsService/FetchWeights",
}
"""What services of other roles pull: batches and weights. They begin nothing."""

SEEN_BY_READERS = {
    "/rolemesh.v1.WorkerService/GetCapabilities",
    "/rolemesh.v1.WorkerService/GetStatus",
}
ONLY_FOR_ADMINISTRATORS = {
    "/rolemesh.v1.WorkerService/Initialize",
    "/rolemesh.v1.WorkerService/Drain",
}
ONLY_FOR_RUNS = {
    f"/rolemesh.v1.ExchangeService/{name}"
    for name in ("OfferExchange", "JoinExchange", "SendWeights")
}
"""Offers let their holder take the place of a rank: no client learns them."""
AT_THE_COORDINATOR = "/rolemesh.v1.CoordinatorService/"
OF_SERVICES_AT_THE_COORDINATOR = "/rolemesh.v1.RegistryService/"
WITHIN = ("/rolemesh.v1.HostsService/", "/rolemesh.v1.EndpointService/")
"""Among hosts, or ranks, of one service: nothing outside it may call."""


def allowed(member: str) -> set[str]:
    """Methods that a member may call at the actor."""
    return {
        method
        for method, policy in method_policies().items()
        if policy.allows(member, "actor")
        and not method.startswith((AT_THE_COORDINATOR, OF_SERVICES_AT_THE_COORDINATOR))
    }


def test_members_may_call_what_they_need_and_nothing_else() -> None:
    of_services = {
        method
        for method in rolemesh_methods()
        if not method.startswith((AT_THE_COORDINATOR, OF_SERVICES_AT_THE_COORDINATOR, *WITHIN))
    }
    within = {method for method in rolemesh_methods() if method.startswith(WITHIN)}
    assert allowed("coordinator") == of_services
    # Rank 0 passes every call on to the others.
    assert allowed("actor") == of_services | within
    assert allowed("critic") == SEEN_BY_ROLES
    assert allowed("client/read") == SEEN_BY_READERS
    of_clients = of_services - ONLY_FOR_RUNS
    assert of_clients | ONLY_FOR_RUNS == of_services
    assert allowed("client/drive") == of_clients - ONLY_FOR_ADMINISTRATORS
    assert allowed("client/admin") == of_clients
    for stranger in ("", "client", "client/", "client/root", "coordinator/1/x"):
        assert allowed(stranger) <= SEEN_BY_ROLES
    assert allowed("client/root") == set()


def test_services_may_register_at_the_coordinator_and_do_nothing_else_there() -> None:
    for method, policy in method_policies().items():
        if method.startswith(AT_THE_COORDINATOR):
            assert not policy.allows("actor", "coordinator")
            assert policy.allows("client/admin", "coordinator")
        if method.startswith(OF_SERVICES_AT_THE_COORDINATOR):
            assert policy.allows("actor", "coordinator")
            assert not policy.allows("client/admin", "coordinator")
            assert not policy.allows("coordinator", "coordinator")


def test_a_method_that_names_no_caller_has_no_policy() -> None:
    # Missing means denied: the server's interceptor refuses a method without a policy.
    assert Policy(1.0, Idempotency.IDEMPOTENT).callers == frozenset()
    assert not Policy(1.0, Idempotency.IDEMPOTENT).allows("client/admin", "actor")
    assert not Policy(1.0, Idempotency.IDEMPOTENT).allows("coordinator", "actor")
