"""Every cell of the transition table, through the verbs: each act on a record in each phase."""

from __future__ import annotations

import pytest

from holdfast._core.jobs import Job, Update
from holdfast._core.replies import CancelResult, Placed, SettleResult
from tests.storage.stage import Stage
from tools.transitions import TRANSITIONS, Act, Phase, phase_of

DAY = 86_400
SETTLE = (Act.COMPLETE, Act.FAIL, Act.RETRY, Act.RELEASE)


async def bring_into(stage: Stage, phase: Phase) -> Job | None:
    """Bring job "a" into a phase. Returns its last lease, if it ever had one."""
    if phase is Phase.NONE:
        return None
    await stage.enqueue("a")
    if phase is Phase.WAITING:
        return None
    if phase is Phase.CANCELLED:
        await stage.cancel("a")
        return None
    job = await stage.claim_one()
    match phase:
        case Phase.DEFERRED:
            await stage.enqueue("a", update=Update())
        case Phase.CANCELLING:
            await stage.cancel("a")
        case Phase.CANCELLING_DEFERRED:
            await stage.cancel("a")
            await stage.enqueue("a", update=Update())
        case Phase.COMPLETED:
            await stage.complete(job, ttl=DAY)
        case Phase.STALE:
            await stage.complete(job, ttl=DAY, dedup=0)
        case Phase.FAILED:
            await stage.fail(job, ttl=DAY)
        case Phase.REMEMBERED:
            await stage.fail(job, ttl=DAY, remember=True)
        case _:
            pass
    return job


async def do(stage: Stage, act: Act, job: Job | None, *, remember: bool = True) -> object:
    """Do one act to job "a", and return the reply."""
    match act:
        case Act.KEEP:
            return (await stage.enqueue("a")).placed
        case Act.UPDATE:
            return (await stage.enqueue("a", update=Update())).placed
        case Act.CLAIM:
            return await stage.claim(1, worker="w2")
        case Act.CANCEL:
            return await stage.cancel("a")
        case Act.EXPIRE:
            return (await stage.expire()).stalled
        case Act.FORGET:
            stage.clock.advance(8 * DAY)
            return (await stage.sweep()).forgotten
        case Act.COMPLETE:
            return SettleResult.LOST if job is None else await stage.complete(job, ttl=3600 if remember else 0)
        case Act.FAIL:
            return SettleResult.LOST if job is None else await stage.fail(job)
        case Act.RETRY:
            return SettleResult.LOST if job is None else await stage.retry(job)
        case Act.RELEASE:
            return SettleResult.LOST if job is None else await stage.release(job)


CELLS = [(phase, act, after) for phase, acts in TRANSITIONS.items() for act, after in acts.items()]


@pytest.mark.parametrize(("phase", "act", "after"), CELLS, ids=[f"{phase}-{act}" for phase, act, _ in CELLS])
async def test_act_leads_to_the_phase_in_the_table(
    stage: Stage, phase: Phase, act: Act, after: tuple[Phase, ...]
) -> None:
    job = await bring_into(stage, phase)
    assert phase_of(await stage.get("a"), stage.wall()) is phase
    await do(stage, act, job)
    assert phase_of(await stage.get("a"), stage.wall()) is after[0]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.CANCELLING])
async def test_a_completion_with_nothing_to_remember_leaves_no_record(stage: Stage, phase: Phase) -> None:
    job = await bring_into(stage, phase)
    await do(stage, Act.COMPLETE, job, remember=False)
    assert phase_of(await stage.get("a"), stage.wall()) is TRANSITIONS[phase][Act.COMPLETE][1]


INERT: dict[Act, object] = {
    Act.CLAIM: [],
    Act.EXPIRE: [],
    Act.CANCEL: CancelResult.MISSING,
    **dict.fromkeys(SETTLE, SettleResult.LOST),
}
OTHER_CELLS = [(phase, act) for phase in Phase for act in INERT if act not in TRANSITIONS[phase]]


@pytest.mark.parametrize(("phase", "act"), OTHER_CELLS, ids=[f"{phase}-{act}" for phase, act in OTHER_CELLS])
async def test_an_act_that_the_table_does_not_list_changes_nothing(stage: Stage, phase: Phase, act: Act) -> None:
    job = await bring_into(stage, phase)
    before = await stage.get("a")
    assert await do(stage, act, job) == INERT[act]
    assert await stage.get("a") == before


PLACED = {
    Phase.NONE: (Placed.NEW, Placed.NEW),
    Phase.WAITING: (Placed.DUPLICATE, Placed.UPDATED),
    Phase.RUNNING: (Placed.DUPLICATE, Placed.DEFERRED),
    Phase.DEFERRED: (Placed.DUPLICATE, Placed.DEFERRED),
    Phase.CANCELLING: (Placed.DUPLICATE, Placed.DEFERRED),
    Phase.CANCELLING_DEFERRED: (Placed.DUPLICATE, Placed.DEFERRED),
    Phase.COMPLETED: (Placed.COMPLETED, Placed.NEW),
    Phase.STALE: (Placed.NEW, Placed.NEW),
    Phase.FAILED: (Placed.NEW, Placed.NEW),
    Phase.REMEMBERED: (Placed.FAILED, Placed.NEW),
    Phase.CANCELLED: (Placed.NEW, Placed.NEW),
}


@pytest.mark.parametrize("phase", Phase)
async def test_an_enqueue_says_what_it_did(stage: Stage, phase: Phase) -> None:
    await bring_into(stage, phase)
    assert await do(stage, Act.KEEP, None) is PLACED[phase][0]
    stage.queue = "other"
    await bring_into(stage, phase)
    assert await do(stage, Act.UPDATE, None) is PLACED[phase][1]


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.RUNNING, Phase.DEFERRED])
async def test_a_live_job_is_not_forgotten_however_long_it_takes(stage: Stage, phase: Phase) -> None:
    await bring_into(stage, phase)
    stage.clock.advance(3650 * DAY)
    assert phase_of(await stage.get("a"), stage.wall()) is phase
