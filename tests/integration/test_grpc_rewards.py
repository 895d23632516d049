"""Rewards over gRPC from servers of other makes, each a process written from protos alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.example_servers import (
    EXAMPLES,
    INFERENCE_PROTO,
    OUTSIDER,
    ROOT,
    compile_protos,
    script,
)
from support.outside_rows import reward_row, reward_rows

from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import GrpcRewardSpec, KServeRewardSpec
from rolemesh.services.reward.outside.base import (
    OutsideReward,
    RewardAnswerInvalidError,
    RewardRefusedError,
    RewardTimeoutError,
    RewardUnavailableError,
    checked_metrics,
    current_step,
)
from rolemesh.services.reward.outside.endpoints import EndpointReward
from rolemesh.services.reward.outside.make import make_outside_reward
from rolemesh.services.reward.outside.protocols.grpc_reward import GrpcRewardClient

NO_SANDBOX = find_sandbox("off")
"""For rewards that run no function."""
NUM_SOAK_CALLS = 1000
MOST_GROWTH_BYTES = 8 << 20
"""Noise of the allocator; a leak of 11 KiB a call would be more."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("protos")
    (folder / "inference.proto").write_text(INFERENCE_PROTO)
    return {
        "reward": compile_protos(ROOT / "protos", folder / "reward.binpb"),
        "inference": compile_protos(folder, folder / "inference.binpb"),
    }


@contextlib.contextmanager
def outsider(images: dict[str, Path], kind: str, fault: str = "") -> Iterator[str]:
    with script(OUTSIDER, str(images[kind]), kind, fault) as url:
        yield url


@contextlib.asynccontextmanager
async def asking(spec: GrpcRewardSpec | KServeRewardSpec) -> AsyncIterator[OutsideReward]:
    reward = make_outside_reward("it", spec, NO_SANDBOX)
    try:
        yield reward
    finally:
        await reward.close()


async def test_a_server_written_from_the_proto_alone_is_asked(images: dict[str, Path]) -> None:
    with outsider(images, "reward") as url:
        async with asking(GrpcRewardSpec(urls=(url,), batch_size=2)) as reward:
            judgement = await reward.judge(reward_rows("a", "bb", "", "d\u00e4\ud83d", "ccc"))
    # Half a character cannot be sent: it becomes a question mark.
    assert judgement.rewards == [1.0, 2.0, 0.0, 3.0, 3.0]
    assert not judgement.failures
    # Means over the rows of first lengths 1, 0 and 3 in batches of 2, 2 and 1.
    assert judgement.metrics["length"] == pytest.approx((2 * 1 + 2 * 0 + 1 * 3) / 5)


async def test_the_example_server_is_asked() -> None:
    with script(EXAMPLES / "reward_server.py", "0") as url:
        async with asking(GrpcRewardSpec(urls=(url,))) as reward:
            rows = [reward_row("4", answer="4"), reward_row("5", answer="4")]
            assert (await reward.judge(rows)).rewards == [1.0, 0.0]


async def test_a_batch_of_long_rows_stays_below_the_size_that_servers_take(
    images: dict[str, Path],
) -> None:
    rows = [
        replace(reward_row("x" * 1000), completion_tokens=tuple(range(200_000, 500_000)))
        for _ in range(8)
    ]
    with outsider(images, "reward") as url:
        async with asking(GrpcRewardSpec(urls=(url,), batch_size=8)) as reward:
            assert (await reward.judge(rows)).rewards == [1000.0] * 8


async def test_a_flapping_server_is_asked_again_under_the_same_key(
    images: dict[str, Path],
) -> None:
    with outsider(images, "reward", "flapping") as url:
        async with asking(GrpcRewardSpec(urls=(url,), batch_size=1)) as reward:
            judgement = await reward.judge(reward_rows("a", "bb"))
    assert judgement.rewards == [1.0, 2.0]
    assert judgement.metrics["retries"] >= 2


async def test_a_request_has_a_key_by_its_rows_and_step(images: dict[str, Path]) -> None:
    with outsider(images, "reward", "keys") as url:
        async with asking(GrpcRewardSpec(urls=(url,), batch_size=1)) as reward:
            for rows, num_keys in ((["key"], 1), (["key"], 1), (["key 2"], 2)):
                assert (await reward.judge(reward_rows(*rows))).rewards == [num_keys]
            token = current_step.set(1)
            assert (await reward.judge(reward_rows("key"))).rewards == [3.0]
            current_step.reset(token)


@pytest.mark.parametrize(
    ("fault", "error", "found"),
    [
        ("short", RewardAnswerInvalidError, "expected 2 rewards"),
        ("nan", RewardAnswerInvalidError, "finite number for row 0"),
        ("huge", RewardRefusedError, "RESOURCE_EXHAUSTED"),
        ("silent", RewardAnswerInvalidError, "the end of the stream before the rewards"),
        ("reference", RewardAnswerInvalidError, "a message with result"),
        ("empty", RewardAnswerInvalidError, "nothing in it"),
        ("twice", RewardAnswerInvalidError, "a further message, rewards"),
        ("metric", RewardAnswerInvalidError, "odd name"),
        ("garbage", RewardAnswerInvalidError, "bytes that are no ComputeRewardResponse"),
        ("refuses", RewardRefusedError, "INVALID_ARGUMENT.*not like this"),
        ("raises", RewardRefusedError, "a bug of the server"),
    ],
)
async def test_a_lying_server_is_not_believed_and_not_asked_again(
    images: dict[str, Path], fault: str, error: type[Exception], found: str
) -> None:
    with outsider(images, "reward", fault) as url:
        async with asking(GrpcRewardSpec(urls=(url,), max_response_bytes=1 << 20)) as reward:
            judgement = await reward.judge(reward_rows("a", "bb"))
    assert judgement.rewards == [None, None]
    assert judgement.metrics["retries"] == 0
    with pytest.raises(error, match=found):
        raise judgement.failures[1]


async def test_a_slow_server_is_given_up(images: dict[str, Path]) -> None:
    with outsider(images, "reward", "slow") as url:
        async with asking(GrpcRewardSpec(urls=(url,), timeout_s=0.5, tries=2)) as reward:
            judgement = await reward.judge(reward_rows("a"))
    assert isinstance(judgement.failures[0], RewardTimeoutError)
    assert judgement.metrics["errors"] == 2


async def test_a_dead_server_is_unavailable_and_another_replica_answers(
    images: dict[str, Path],
) -> None:
    with outsider(images, "reward") as dead:
        pass
    async with asking(GrpcRewardSpec(urls=(dead,), tries=2)) as reward:
        judgement = await reward.judge(reward_rows("a"))
        assert isinstance(judgement.failures[0], RewardUnavailableError)
    with outsider(images, "reward") as url:
        async with asking(GrpcRewardSpec(urls=(dead, url), batch_size=1)) as reward:
            judgement = await reward.judge(reward_rows("a", "bb"))
    assert judgement.rewards == [1.0, 2.0]


async def test_a_token_goes_along(images: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with outsider(images, "reward", "token") as url:
        async with asking(GrpcRewardSpec(urls=(url,), token_variable="JUDGE_TOKEN")) as reward:
            assert (await reward.judge(reward_rows("a"))).rewards == [1.0]
        async with asking(GrpcRewardSpec(urls=(url,))) as reward:
            failure = (await reward.judge(reward_rows("a"))).failures[0]
    assert isinstance(failure, RewardRefusedError)


async def test_a_cancelled_call_ends(images: dict[str, Path]) -> None:
    with outsider(images, "reward", "slow") as url:
        async with asking(GrpcRewardSpec(urls=(url,))) as reward:
            call = asyncio.create_task(reward.judge(reward_rows("a")))
            await asyncio.sleep(0.3)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call


def test_a_url_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="give the port too"):
        make_outside_reward("it", GrpcRewardSpec(urls=("grpc://host",)), NO_SANDBOX)


@pytest.mark.parametrize("rest", ["/get_reward", "?model=a", "#a"])
def test_a_path_which_would_not_be_sent_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match="gRPC knows no path, so give grpc://host:1"):
        make_outside_reward("it", GrpcRewardSpec(urls=(f"grpc://host:1{rest}",)), NO_SANDBOX)


def test_metrics_of_which_no_mean_can_be_taken_are_refused() -> None:
    with pytest.raises(RewardAnswerInvalidError, match="finite metrics"):
        checked_metrics({"length": 1.7e308}, "it")


@pytest.mark.parametrize("form", ["", "raw", "column"])
async def test_an_inference_server_is_asked(images: dict[str, Path], form: str) -> None:
    with outsider(images, "inference", form) as url:
        spec = KServeRewardSpec(
            urls=(url,), model="judge", answer_input="answer", sends_column=form == "column"
        )
        async with asking(spec) as reward:
            judgement = await reward.judge(reward_rows("a", "b\u00e4", ""))
    assert not judgement.failures
    assert judgement.rewards == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("fault", "error", "found"),
    [
        ("shape", RewardAnswerInvalidError, r"shape list \[2, 2\] for 2 rows"),
        ("text", RewardAnswerInvalidError, "datatype 'BYTES'"),
        ("unnamed", RewardAnswerInvalidError, r"outputs \['other', 'score'\]"),
        ("nan", RewardAnswerInvalidError, "finite number for row 0"),
        ("garbage", RewardAnswerInvalidError, "bytes that are no ModelInferResponse"),
        ("raw_cut", RewardAnswerInvalidError, "5 raw bytes"),
        ("raw_absent", RewardAnswerInvalidError, "1 raw tensors"),
        ("column", RewardRefusedError, "INVALID_ARGUMENT"),
    ],
)
async def test_other_answers_of_an_inference_server_are_refused(
    images: dict[str, Path], fault: str, error: type[Exception], found: str
) -> None:
    with outsider(images, "inference", fault) as url:
        async with asking(KServeRewardSpec(urls=(url,), model="judge")) as reward:
            judgement = await reward.judge(reward_rows("a", "bb"))
    with pytest.raises(error, match=found):
        raise judgement.failures[0]


def test_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        KServeRewardSpec.model_validate(
            {"urls": "grpc://h:1", "model": "m", "prompt_input": "completion"}
        )


@pytest.mark.slow
async def test_a_thousand_calls_with_errors_leak_nothing(images: dict[str, Path]) -> None:
    this = psutil.Process()
    rows = reward_rows(*["text"] * 16)
    with outsider(images, "reward", "flapping") as url:
        # It answers every third request: most tries fail, and no reward does.
        spec = GrpcRewardSpec(urls=(url,), tries=50, batch_size=4, breaker_failures=1000)
        reward = EndpointReward("it", spec, [GrpcRewardClient(url, spec)], sleep=no_sleep)
        for number in range(NUM_SOAK_CALLS):
            if number == NUM_SOAK_CALLS // 4:
                files, tasks = this.num_fds(), len(asyncio.all_tasks())
                memory = this.memory_info().rss
            judgement = await reward.judge(rows)
            assert judgement.rewards == [4.0] * 16
        assert this.num_fds() <= files
        assert len(asyncio.all_tasks()) == tasks
        assert this.memory_info().rss - memory < MOST_GROWTH_BYTES
        await reward.close()


async def no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)
