"""Alerts: rules that find, in what a run has reported, what an operator should look at.

Pure functions over records, executed graphs and device use. A threshold is a named constant with
its reason; a run that goes well gives no alert.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rolemesh.coordinator.dataflow.futures import Node, NodeKind
from rolemesh.coordinator.dataflow.trace import span_seconds, waiting_seconds
from rolemesh.v1 import coordinator_pb2

RECENT_STEPS = 10
"""Newest steps that a rule looks at. One step alone would be the noise of one batch."""

EARLIER_STEPS = 20
"""Steps before the recent ones, with which a rule compares them."""

RECENT_GRAPHS = 5
"""Newest graphs from which waiting is judged: completion lengths differ from step to step."""

WAIT_SHARE = 0.5
"""Share of time that a pool waits for another role, above which there is an alert: more than half
of what the pool has is then unused."""

KL_PER_TOKEN = 2.0
"""Nats. The policy's tokens are then exp(2), seven times, as likely as under the reference. Small
models that learn a form of answer stay below 1.5."""

KL_GROWTH = 3.0
"""Factor over the steps before. A policy that has learned its task changes little in 20 steps."""

KL_GROWTH_FROM = 0.5
"""Nats for each token. Below this, every run that begins to learn grows by a factor of 3."""

ENTROPY_FLOOR = 0.01
"""Nats a token: the likeliest token has then more than 99.8 %, so that samples of a prompt are
alike. Healthy runs with one-word answers end near 0.06."""

ENTROPY_LEFT = 0.05
"""Share of the entropy of the first steps. A policy with little entropy from the start did not
collapse, so its entropy must also have fallen below this share."""

REWARD_SPREAD = 1e-6
"""Deviation of rewards in a batch from which on they count as equal: rounding of float32 at 1."""

ALIKE_GROUPS = 0.9
"""Share of groups with one reward for all, which teach nothing; then a step costs ten times what it
teaches."""

CLIPPED_SHARE = 0.3
"""Share of tokens whose gradient is clipped away. PPO runs that learn stay below 0.1; above 0.3
updates are too large for the data."""

GRADIENT_GROWTH = 10.0
"""Factor over the median of the steps before; batches of healthy runs differ by less than 3."""

CUT_SHARE = 0.3
"""Share of completions that reach the length limit, so that incomplete answers are judged."""

SAMPLER_DIFFERENCE = 0.1
"""Nats: mean distance of a token's log-prob under the weights that train from that under those that
sampled. A sampler of its own in bfloat16 differs by 0.03."""

IDLE_SHARE = 0.1
"""Share of time that an accelerator computes, below which it is called idle."""

IDLE_SECONDS = 300.0
"""Time over which an accelerator must be idle: longer than a phase of a step."""

MEMORY_SHARE = 0.97
"""Of a device's memory. Samplers take 0.9 by design; above, the next longer batch fails."""

SLOW_FACTOR = 2.0
"""Multiple of the median step before. Longer completions alone seldom double a step."""

SLOW_STEPS = 3
"""Steps in a row that must be slow: a single one may be a checkpoint or an evaluation."""

HELD_OUT_ERRORS = 2.0
"""Standard errors of the difference by which a held-out score must have fallen: by chance alone one
time in 40."""


RECOVERIES = 3
"""Recoveries within a number of steps from which on there is an alert: one is chance, and a process
that dies of the same cause again and again makes three before an operator looks."""

RECOVERY_STEPS = 20
"""Newest steps within which recoveries are counted."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What the rules look at."""

    records: Sequence[Mapping[str, float]]
    graphs: Sequence[Sequence[Node]]
    devices: coordinator_pb2.GetDeviceUseResponse
    recoveries: Sequence[coordinator_pb2.Recovered]

    def values(self, name: str) -> list[float]:
        """A metric of all steps that have it, newest last."""
        return [record[name] for record in self.records if name in record]

    def recent(self, name: str) -> float | None:
        """Its mean over the recent steps; None where there are fewer."""
        values = self.values(name)[-RECENT_STEPS:]
        return statistics.fmean(values) if len(values) == RECENT_STEPS else None

    def recent_sum(self, name: str) -> float:
        """Its sum over the recent steps, of which not all need have it."""
        return sum(record.get(name, 0.0) for record in self.records[-RECENT_STEPS:])

    def earlier(self, name: str) -> float | None:
        """Its mean over the steps before the recent ones; None where there are fewer."""
        values = self.values(name)[-RECENT_STEPS - EARLIER_STEPS : -RECENT_STEPS]
        return statistics.fmean(values) if len(values) == EARLIER_STEPS else None

    def named(self, pattern: str) -> list[tuple[str, str]]:
        """Names of recent metrics that match the pattern, each with the text of its group."""
        names = dict.fromkeys(name for record in self.records[-RECENT_STEPS:] for name in record)
        return [(name, m.group(1)) for name in names if (m := re.fullmatch(pattern, name))]


def alerts_of(
    records: Sequence[Mapping[str, float]],
    graphs: Sequence[Sequence[Node]],
    devices: coordinator_pb2.GetDeviceUseResponse,
    recoveries: Sequence[coordinator_pb2.Recovered] = (),
) -> list[coordinator_pb2.Alert]:
    """Returns all alerts, the most pressing first.

    Args:
        records: Lines of metrics.jsonl, newest last; 30 of them are enough for every rule but that
            of the held-out score, which looks at all.
        graphs: Executed graphs of steps, newest last.
        devices: How busy the run's devices were.
        recoveries: Those that the run has survived, newest last.
    """
    run = _Run(records, graphs, devices, recoveries)
    found = [alert for rule in RULES for alert in rule(run)]
    return sorted(found, key=lambda alert: -alert.level)


def _alert(
    rule: str,
    text: str,
    remedy: str,
    level: coordinator_pb2.AlertLevel.ValueType = coordinator_pb2.ALERT_LEVEL_WARNING,
) -> coordinator_pb2.Alert:
    return coordinator_pb2.Alert(level=level, rule=rule, text=text, remedy=remedy)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _not_finite(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    newest = run.records[-1] if run.records else {}
    names = sorted(name for name, value in newest.items() if not math.isfinite(value))
    if names:
        yield _alert(
            "NOT_FINITE",
            f"The newest step has metrics that are no numbers: {', '.join(names)}.",
            "Stop the run, lower the learning rate and go on with `rolemesh train --resume`.",
            coordinator_pb2.ALERT_LEVEL_CRITICAL,
        )


def _kl_high(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    now = run.recent("kl/mean")
    if now is None:
        return
    remedy = "Raise the coefficient of the KL penalty or lower the actor's learning rate."
    before = run.earlier("kl/mean")
    if now >= KL_PER_TOKEN:
        text = f"The policy is {now:.2f} nats a token away from the reference."
        yield _alert("KL_HIGH", text, remedy)
    elif before is not None and now >= KL_GROWTH_FROM and now >= KL_GROWTH * max(before, 0.0):
        text = (
            f"The KL to the reference grew from {before:.2f} to {now:.2f} nats a token "
            f"within {RECENT_STEPS + EARLIER_STEPS} steps."
        )
        yield _alert("KL_GROWS", text, remedy)


def _entropy_collapsed(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    now = run.recent("entropy")
    if now is None or now >= ENTROPY_FLOOR:
        return
    first = statistics.fmean(run.values("entropy")[:RECENT_STEPS])
    if now < ENTROPY_LEFT * first:
        yield _alert(
            "ENTROPY_COLLAPSED",
            f"Entropy fell from {first:.2f} to {now:.4f} nats a token: "
            "samples of a prompt are nearly all alike.",
            "Add an entropy bonus, raise the upper clip bound or the sampling temperature, or go "
            "back to an earlier checkpoint.",
        )


def _reward_flat(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    remedy = (
        "Look at the samples: the task is too easy, too hard, or the reward does not tell good "
        "from bad. Choose other prompts, or select groups with a spread."
    )
    alike, groups = run.recent("groups/all_equal"), run.recent("groups/count")
    spread = run.recent("reward/std")
    if spread is not None and spread <= REWARD_SPREAD:
        text = f"All rewards of each of the last {RECENT_STEPS} steps are equal: nothing is learned"
        yield _alert("REWARD_FLAT", f"{text}.", remedy, coordinator_pb2.ALERT_LEVEL_CRITICAL)
    elif alike is not None and groups is not None and alike >= ALIKE_GROUPS * groups > 0:
        text = f"In {_percent(alike / groups)} of groups all completions have one reward"
        yield _alert("GROUPS_ALIKE", f"{text}: they teach nothing.", remedy)


def _clipped(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    high, low = run.recent("clip_fraction_high"), run.recent("clip_fraction_low")
    share = (high or 0.0) + (low or 0.0)
    if share > CLIPPED_SHARE:
        yield _alert(
            "CLIP_HIGH",
            f"{_percent(share)} of tokens are clipped in the actor's updates: "
            "the policy moves further than its samples can tell.",
            "Lower the actor's learning rate, or make fewer updates on each batch.",
        )


def _gradient_grew(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    for name, role in [("grad_norm", "actor"), *run.named(r"([a-z]+)/grad_norm")]:
        values = run.values(name)
        if len(values) <= RECENT_STEPS:
            continue
        usual = statistics.median(values[-1 - RECENT_STEPS - EARLIER_STEPS : -1])
        if usual > 0 and values[-1] > GRADIENT_GROWTH * usual:
            yield _alert(
                "GRADIENT_GREW",
                f"The gradient of the {role} is {values[-1]:.3g}, "
                f"{values[-1] / usual:.0f} times its usual size.",
                f"Look at rewards and samples of this step; where it stays, lower the {role}'s "
                "learning rate or its gradient clip.",
            )


def _completions_cut(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    finished = run.recent("finished_fraction")
    if finished is not None and 1.0 - finished > CUT_SHARE:
        yield _alert(
            "COMPLETIONS_CUT",
            f"{_percent(1.0 - finished)} of completions reach the length limit before they end.",
            "Raise the limit of new tokens, or punish overlong completions.",
        )


def _sampler_differs(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    difference = run.recent("sampler_logprob_diff_mean")
    if difference is None or difference <= SAMPLER_DIFFERENCE:
        return
    behind = run.recent("staleness/max") or 0.0
    if behind > 0:
        yield _alert(
            "SAMPLES_STALE",
            f"Samples are up to {behind:.0f} steps old, and the policy has moved on by "
            f"{difference:.2f} nats a token since.",
            "Lower the schedule's max_staleness or the learning rate, or give rollout more "
            "devices.",
        )
    else:
        yield _alert(
            "SAMPLER_DIFFERS",
            f"Sampler and trainer disagree by {difference:.2f} nats a token about the same "
            "weights.",
            "Compare dtype, temperature and weights of the sampler with the trainer's.",
        )


def _reward_trouble(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    num_steps = len(run.records[-RECENT_STEPS:])
    for name, reward in run.named(r"reward/(.+)/dropped_rows"):
        if (dropped := run.recent_sum(name)) > 0:
            yield _alert(
                "REWARD_ROWS_DROPPED",
                f"{dropped:.0f} rows of the last {num_steps} steps were left out, because "
                f"the reward {reward} could not judge them.",
                "See the log of the reward service; check the endpoint with "
                "`rolemesh reward check`.",
            )
    for name, reward in run.named(r"reward/(.+)/errors"):
        if (errors := run.recent_sum(name)) > 0:
            yield _alert(
                "REWARD_ERRORS",
                f"Calls of the reward {reward} failed {errors:.0f} times in the last "
                f"{num_steps} steps.",
                "See the log of the reward service; give the endpoint more replicas or a longer "
                "timeout.",
            )


def _teacher_trouble(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    num_steps = len(run.records[-RECENT_STEPS:])
    if (dropped := run.recent_sum("teacher/dropped_rows")) > 0:
        yield _alert(
            "TEACHER_ROWS_DROPPED",
            f"{dropped:.0f} rows of the last {num_steps} steps were left out, because the "
            "teacher's servers did not score them.",
            "See the log of the teacher service, and the servers' own.",
        )


def _step_slowed(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    seconds = run.values("time/step")
    before = seconds[-SLOW_STEPS - RECENT_STEPS - EARLIER_STEPS : -SLOW_STEPS]
    if len(before) < RECENT_STEPS:
        return
    usual, newest = statistics.median(before), seconds[-SLOW_STEPS:]
    if min(newest) <= SLOW_FACTOR * usual:
        return
    newest_records, earlier = run.records[-SLOW_STEPS:], run.records[:-SLOW_STEPS]
    growth = {
        name: _mean_of(newest_records, name) - _mean_of(earlier, name)
        for name in newest_records[-1]
        if name.startswith("time/") and name != "time/step"
    }
    most = max(growth, key=lambda name: growth[name], default=None)
    where = f"; most of it in {most.removeprefix('time/').replace('_', ' ')}" if most else ""
    yield _alert(
        "STEP_SLOWED",
        f"The last {SLOW_STEPS} steps took {statistics.fmean(newest):.1f} s, usual were "
        f"{usual:.1f} s{where}.",
        "Compare lengths of completions and device use of these steps with earlier ones; look for "
        "other work on the machines.",
    )


def _mean_of(records: Sequence[Mapping[str, float]], name: str) -> float:
    values = [record[name] for record in records if name in record]
    return statistics.fmean(values) if values else 0.0


def _undone(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    recent = run.records[-RECENT_STEPS:]
    skipped = sum("health/skipped" in record for record in recent)
    times = [record.get("health/roll_backs", 0.0) for record in recent] or [0.0]
    went_back = times[-1] - (times[0] if len(run.records) > RECENT_STEPS else 0.0)
    remedy = "The events say which rule struck: look at the samples of these steps, and lower the "
    remedy += "learning rate or correct the rewards."
    if skipped:
        text = f"Of the last {len(recent)} steps {skipped} were undone and skipped by run.health."
        yield _alert("STEPS_SKIPPED", text, remedy)
    if went_back > 0:
        text = f"run.health took the run back {went_back:.0f} times in the newest steps."
        yield _alert("RUN_WENT_BACK", text, remedy)


def _held_out_fell(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    scored = [record for record in run.records if "held_out/score" in record]
    if len(scored) < 2:
        return
    newest, best = scored[-1], max(scored[:-1], key=lambda record: record["held_out/score"])
    fall = best["held_out/score"] - newest["held_out/score"]
    error = math.hypot(*(r.get("held_out/standard_error", 0.0) for r in (newest, best)))
    if fall > HELD_OUT_ERRORS * error and fall > 0:
        yield _alert(
            "HELD_OUT_FELL",
            f"The held-out score is {newest['held_out/score']:.3f}, {fall:.3f} below that of step "
            f"{best.get('step', 0):.0f}.",
            "The policy may exploit the reward: read its samples, and go back to the checkpoint "
            f"of step {best.get('step', 0):.0f} if they are worse.",
        )


def _recovers_often(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    newest = run.records[-1]["step"] if run.records else 0.0
    recent = [one for one in run.recoveries if one.step > newest - RECOVERY_STEPS]
    if len(recent) >= RECOVERIES:
        yield _alert(
            "RECOVERS_OFTEN",
            f"The run recovered {len(recent)} times in the last {RECOVERY_STEPS} steps, in "
            f"{sum(one.seconds for one in recent):.0f} s in all; the last time from: "
            f"{recent[-1].cause}.",
            "Look at the log of what failed and of its machine: a process that is killed by "
            "signal 9 most often had no memory left.",
        )


def _devices_used(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    for use in run.devices.devices:
        who = f"{use.service}, rank {use.rank}, {use.device}"
        if use.memory_bytes and use.memory_bytes[-1] > MEMORY_SHARE * use.memory_total_bytes > 0:
            share = use.memory_bytes[-1] / use.memory_total_bytes
            yield _alert(
                "MEMORY_NEARLY_FULL",
                f"Memory of {who} is {_percent(share)} full.",
                "Make micro-batches smaller, shard over more ranks, or let the roles of the pool "
                "sleep in turn.",
            )
        if not _is_accelerator(use.device) or not use.times:
            continue
        seconds = use.times[-1].ToNanoseconds() / 1e9 - use.times[0].ToNanoseconds() / 1e9
        if seconds >= IDLE_SECONDS and (busy := statistics.fmean(use.busy)) < IDLE_SHARE:
            yield _alert(
                "DEVICE_IDLE",
                f"{who} computed {_percent(busy)} of the last {seconds / 60:.0f} minutes.",
                "Put the role into a pool with others, or take the device away from it.",
                coordinator_pb2.ALERT_LEVEL_INFO,
            )


def _is_accelerator(device: str) -> bool:
    return not device.startswith("cpu")


def _roles_wait(run: _Run) -> Iterator[coordinator_pb2.Alert]:
    """Alerts of pools that wait while the critical path is with a role of another pool."""
    with_accelerator = {d.service for d in run.devices.devices if _is_accelerator(d.device)}
    total = 0.0
    waits: defaultdict[tuple[str, str], float] = defaultdict(float)
    roles: defaultdict[str, dict[str, None]] = defaultdict(dict)
    is_worth: defaultdict[str, bool] = defaultdict(bool)
    for nodes in run.graphs[-RECENT_GRAPHS:]:
        total += span_seconds(nodes)
        for node in nodes:
            roles[node.pool][node.role] = None
            # A reward function on a CPU holds no device that other roles could use.
            is_judge = node.role in ("reward", "cost") and node.kind is not NodeKind.UPDATE
            is_worth[node.pool] |= not is_judge or node.service in with_accelerator
        for waits_for, idle in waiting_seconds(nodes).items():
            waits[waits_for] += idle
    for pool, waiting in roles.items():
        seconds, other = max((waits[pool, name], name) for held in roles.values() for name in held)
        if is_worth[pool] and total > 0 and seconds >= WAIT_SHARE * total:
            who, verb = " and ".join(waiting), "waits" if len(waiting) == 1 else "wait"
            yield _alert(
                "ROLE_WAITS",
                f"{who} {verb} for {other} {_percent(seconds / total)} of the time.",
                f"Give the {other} more devices, or let it share the pool of {who}.",
            )


RULES: tuple[Callable[[_Run], Iterator[coordinator_pb2.Alert]], ...] = (
    _not_finite,
    _undone,
    _reward_flat,
    _reward_trouble,
    _teacher_trouble,
    _entropy_collapsed,
    _kl_high,
    _held_out_fell,
    _gradient_grew,
    _clipped,
    _sampler_differs,
    _completions_cut,
    _roles_wait,
    _recovers_often,
    _step_slowed,
    _devices_used,
)
"""Every rule, in the order in which alerts of one level are shown."""
