-- The life of a job: mirrors _core/lifecycle.py, function by function. A function changes the job that it gets, sets
-- `changed`, and returns the job afterwards (nil: the record is deleted) and the kind of event.

local stamp, place, DEFAULTS = clock.stamp, clock.place, record.DEFAULTS

function lifecycle.damaged(id, now)
  return setmetatable({id = id, priority = 5, generation = now, run_at = now, arrival = now, custom_id = false,
    has_payload = false, outcome = {state = FAILED, generation = now, started_at = 0, worker = '', ended_at = now,
      forget_at = now + 1000 * FAILURE_TTL_MS, dedup_at = 0, codec = 'json', error = DAMAGED}}, DEFAULTS)
end

local function state_of(job)
  return job.outcome and job.outcome.state or job.run and RUNNING or WAITING
end

function lifecycle.forgotten(job, now)
  return job.outcome and job.outcome.forget_at <= now
end

function lifecycle.tidy(job, now)
  if job.previous and job.previous.forget_at <= now then job.previous = nil end
end

-- Note that a client waits for the end of this job. A record names at most four clients; `*` stands for all clients.
local function add_waiter(job, client)
  if string.find(job.waiters, client, 1, true) or job.waiters == '*' then return end
  job.waiters = #job.waiters < MAX_WAITERS * WAITER_BYTES and job.waiters .. client or '*'
  job.changed = true
end

-- The request has a waiter: keep the outcome at least as long as the request asks.
local function waited_for(job, request, now)
  if request.keep_ms == 0 then return end
  local until_at = now + 1000 * request.keep_ms
  if until_at > job.keep_until_at then job.keep_until_at, job.changed = until_at, true end
  add_waiter(job, CLIENT)
end

local function due_of(request, time, at)
  if request.when == WALL_TIME then return {run_at = request.at + time[SKEW], arrival = at, wall_at = request.at} end
  local delay_ms = request.when == DELAY and request.at or 0
  return {run_at = time[LAST_AT] + 1000 * delay_ms, arrival = at, wall_at = 0}
end

-- The time that a rule chooses from two, after both have followed the clock.
local function choose(rule, old, new, time)
  local old_at = place(time, old.run_at, old.wall_at, old.arrival)
  local new_at = place(time, new.run_at, new.wall_at, new.arrival)
  local takes_new = rule == TAKES or (rule == IF_LATER and new_at > old_at) or (rule == IF_EARLIER and new_at < old_at)
  local chosen = takes_new and new or old
  return {run_at = takes_new and new_at or old_at, arrival = chosen.arrival, wall_at = chosen.wall_at}
end

local function set_due(job, due)
  job.run_at, job.arrival, job.wall_at = due.run_at, due.arrival, due.wall_at
end

local function set_work(job, work)
  job.priority, job.terms, job.work_extension = work.priority, work.terms, work.work_extension
  job.payload, job.has_payload = work.payload, true
end

-- Replace the request of a waiting job by another one. The entries of its extension end with the generation that they describe.
local function regenerate(job, request, generation, due)
  set_due(job, due)
  if request.takes_payload then set_work(job, request) end
  if request.resets_counts then job.retries, job.stalls, job.timeouts, job.error = 0, 0, 0, nil end
  job.generation, job.job_extension, job.changed = generation, '', true
end

-- The record of a new generation. `before` is the record that the id had, or nil.
local function fresh(id, custom_id, before, generation, work, due, previous)
  local job = setmetatable({id = id, custom_id = custom_id, changed = true, generation = generation, previous = previous,
    priority = work.priority, terms = work.terms, work_extension = work.work_extension, payload = work.payload,
    has_payload = true, run_at = due.run_at, arrival = due.arrival, wall_at = due.wall_at}, DEFAULTS)
  if before then job.keep_until_at, job.waiters = before.keep_until_at, before.waiters end
  return job
end

local function start(job, request, time, at)
  local takes_stored = job and request.updates and not request.takes_payload and job.has_payload
  local work, due = takes_stored and job or request, due_of(request, time, at)
  local started = fresh(request.id, request.custom_id, job, at, work, due, job and job.outcome)
  if takes_stored then started.raw, started.payload_at = job.raw, job.payload_at end
  waited_for(started, request, time[LAST_AT])
  return started, NEW, at, job and job.outcome.state or 0, KIND.ENQUEUED
end

local function enqueue_on_finished(job, request, time, at)
  local outcome = job.outcome
  if not request.updates and time[LAST_AT] < outcome.dedup_at then
    return job, outcome.state == FAILED and CACHED + 1 or CACHED, outcome.generation, outcome.state
  end
  local takes_stored = request.updates and not request.takes_payload and job.has_payload
  if not takes_stored and not request.payload then return job, 0, 0, outcome.state end
  return start(job, request, time, at)
end

local function update_waiting(job, request, time, at)
  regenerate(job, request, at, choose(request.rule, job, due_of(request, time, at), time))
  waited_for(job, request, time[LAST_AT])
  return job, UPDATED, at, WAITING, KIND.UPDATED
end

local function update_running(job, request, time, at)
  local due, old = due_of(request, time, at), job.run.next
  local following = {generation = at, takes_payload = request.takes_payload, takes_run_at = request.rule,
    resets_counts = request.resets_counts}
  set_work(following, request)
  if old then
    due = choose(request.rule, old, due, time)
    if not request.takes_payload then set_work(following, old) end
    following.takes_payload = old.takes_payload or request.takes_payload
    if old.takes_run_at == TAKES then following.takes_run_at = TAKES end
    following.resets_counts = old.resets_counts or request.resets_counts
  end
  set_due(following, due)
  waited_for(job, request, time[LAST_AT])
  job.run.next, job.run.changed = following, true
  return job, DEFERRED, at, RUNNING, KIND.DEFERRED
end

function lifecycle.enqueue(job, request, time)
  local at = stamp(time)
  if job and lifecycle.forgotten(job, time[LAST_AT]) then job = nil end
  if not job then
    if not request.payload then return nil, 0, 0, 0 end
    return start(nil, request, time, at)
  end
  if job.outcome then return enqueue_on_finished(job, request, time, at) end
  if not request.updates or not request.payload then
    waited_for(job, request, time[LAST_AT])
    return job, DUPLICATE, job.generation, state_of(job)
  end
  if job.run then return update_running(job, request, time, at) end
  return update_waiting(job, request, time, at)
end

local function forget_at(job, ttl_ms, now)
  local until_at = now + 1000 * (job.keep_ms or ttl_ms)
  if job.keep_until_at == 0 then return until_at end
  return max(until_at, job.keep_until_at, now + 1000 * WAITED_MS)
end

local NO_RUN = {fence = 0, worker = ''}

-- How the generation of a job ends. The other fields are set by the caller.
local function outcome_of(job, state, now)
  local run = job.run or NO_RUN
  return {state = state, generation = job.generation, started_at = run.fence, worker = run.worker, ended_at = now,
    dedup_at = 0, codec = 'json'}
end

local function cancelled(job, now)
  local ttl_ms = RESULT_TTL_MS
  if job.terms ~= '' then
    local asked = unpack_from('<I8', job.terms)
    if asked > 0 then ttl_ms = asked - 1 end
  end
  local outcome = outcome_of(job, CANCELLED, now)
  outcome.forget_at = forget_at(job, max(ttl_ms, CANCELLED_TTL_MS), now)
  return outcome
end

function lifecycle.completed(job, settlement, now)
  local outcome = outcome_of(job, COMPLETED, now)
  outcome.result, outcome.codec = settlement.result, settlement.codec
  outcome.dedup_at = now + 1000 * (job.keep_ms or settlement.dedup_ttl_ms)
  outcome.forget_at = max(forget_at(job, settlement.result_ttl_ms, now), outcome.dedup_at)
  if settlement.brief and not job.keep_ms and job.keep_until_at == 0 then outcome.state = BRIEF end
  return outcome
end

local function failed(job, settlement, now)
  local outcome = outcome_of(job, FAILED, now)
  outcome.error = settlement.error
  if settlement.dedup_ttl_ms > 0 then outcome.dedup_at = now + 1000 * (job.keep_ms or settlement.dedup_ttl_ms) end
  outcome.forget_at = max(forget_at(job, settlement.failure_ttl_ms, now), outcome.dedup_at)
  return outcome
end

-- End the generation. The request in `next` takes its place; without one, the outcome is kept until its forget time.
local function finish(job, outcome, kind, now)
  local following, remembered = job.run and job.run.next, outcome.forget_at > now
  if following then
    local previous = remembered and outcome or job.previous
    local promoted = fresh(job.id, job.custom_id, job, following.generation, following, following, previous)
    return promoted, kind, KIND.PROMOTED, outcome
  end
  if not remembered then return nil, kind end
  if outcome.state == COMPLETED or outcome.state == BRIEF then job.has_payload = false end
  job.run, job.outcome, job.error, job.keep_ms, job.changed = nil, outcome, nil, nil, true
  return job, kind, nil, outcome
end

function lifecycle.cancel(job, now)
  if not job or lifecycle.forgotten(job, now) then return job, 'm' end
  if job.outcome then return job, 'f' end
  if not job.run then
    local after, kind, _, outcome = finish(job, cancelled(job, now), KIND.CANCELLED, now)
    return after, 'c', kind, outcome
  end
  if job.run.cancel_asked and not job.run.next then return job, 'a' end
  job.run.cancel_asked, job.run.next, job.run.changed = true, nil, true
  return job, 'a', KIND.CANCEL_ASKED
end

function lifecycle.keep(job, ttl_ms, at_least, client, now)
  if not job or lifecycle.forgotten(job, now) then return 'm' end
  local until_at = now + 1000 * ttl_ms
  job.changed = true
  if not job.outcome then
    if at_least then
      job.keep_until_at = max(job.keep_until_at, until_at)
      add_waiter(job, client)
    else
      job.keep_ms = ttl_ms
    end
    return 'l'
  end
  if job.outcome.state == BRIEF then job.outcome.state = COMPLETED end
  if at_least then
    job.outcome.forget_at = max(job.outcome.forget_at, until_at)
  else
    job.outcome.dedup_at = (job.outcome.state == COMPLETED or job.outcome.dedup_at > 0) and until_at or 0
    job.outcome.forget_at = max(until_at, job.keep_until_at)
  end
  return 'k'
end

function lifecycle.prioritize(job, priority)
  if not job or job.outcome then return 'n' end
  if job.run and job.run.next then job.run.next.priority, job.run.changed = priority, true end
  job.priority, job.changed = priority, true
  return 'y'
end

function lifecycle.claim(job, worker, lease_ms, time)
  job.run = {worker = worker, fence = stamp(time), lease_ms = lease_ms, until_at = time[LAST_AT] + 1000 * lease_ms,
    changed = true}
  job.attempts = job.attempts + 1
  return job, KIND.CLAIMED
end

function lifecycle.follow_clock(job, time)
  job.run_at, job.changed = place(time, job.run_at, job.wall_at, job.arrival), true
end

function lifecycle.holds(job, worker, fence)
  return job and job.run and job.run.fence == fence and job.run.worker == worker
end

function lifecycle.extend(job, lease_ms, progress, now)
  local run = job.run
  run.lease_ms, run.until_at, run.overdue, run.changed = lease_ms, now + 1000 * lease_ms, false, true
  run.progress = progress or run.progress
end

-- The job waits again, with the settlement applied. The request in `next` is merged in by its rules.
local function again(job, kind, time)
  local following = job.run.next
  job.run, job.changed = nil, true
  if following then
    regenerate(job, following, following.generation, choose(following.takes_run_at, job, following, time))
  end
  return job, kind
end

local function counted(job, retry, time)
  job[retry.counts], job.error = job[retry.counts] + 1, retry.error
  if retry.counts == 'stalls' and retry.run_at == 0 and retry.delay_ms == 0 then return end
  job.arrival = stamp(time)
  if retry.run_at > 0 then
    job.run_at, job.wall_at = retry.run_at + time[SKEW], retry.run_at
  else
    job.run_at, job.wall_at = time[LAST_AT] + 1000 * retry.delay_ms, 0
  end
end

local RETRY_KINDS = {retries = KIND.RETRIED, stalls = KIND.STALLED, timeouts = KIND.TIMED_OUT}

function lifecycle.settle(job, settlement, time)
  local now = time[LAST_AT]
  if settlement.kind == COMPLETE then return finish(job, lifecycle.completed(job, settlement, now), KIND.COMPLETED, now) end
  if job.run.cancel_asked then return finish(job, cancelled(job, now), KIND.CANCELLED, now) end
  if settlement.kind == FAIL then
    if settlement.counts then job[settlement.counts] = job[settlement.counts] + 1 end
    return finish(job, failed(job, settlement, now), KIND.FAILED, now)
  end
  if settlement.kind == RELEASE then return again(job, KIND.RELEASED, time) end
  counted(job, settlement, time)
  return again(job, RETRY_KINDS[settlement.counts], time)
end

function lifecycle.take_back(job, time)
  local run = job.run
  if run.cancel_asked then return finish(job, cancelled(job, time[LAST_AT]), KIND.CANCELLED, time[LAST_AT]) end
  job.stalls = job.stalls + 1
  if job.stalls >= 2 then
    local delay_ms = min(run.lease_ms * 2 ^ min(job.stalls - 2, 30), MAX_STALL_DELAY_MS)
    job.run_at, job.arrival, job.wall_at = time[LAST_AT] + 1000 * delay_ms, stamp(time), 0
  end
  return again(job, KIND.STALLED, time)
end

function lifecycle.expire(job, time)
  local run = job.run
  if not run.overdue then
    run.overdue, run.until_at, run.changed = true, time[LAST_AT] + 500 * run.lease_ms, true
    return job
  end
  return lifecycle.take_back(job, time)
end
