--[[ The life of a job on Redis and Valkey: _core/lifecycle.py, transaction.py and engine.py again, name for name, as one script.

A library of functions that servers keep under a name made from its content (calls.py), so that two releases can share
a server. Every call is one atomic step. What a word means is said in _core/lifecycle.py; what a verb promises, in
storage/__init__.py. Payloads, results and errors are bytes that nothing here looks into. For transactions of others,
script.py cuts out what an enqueue needs, by names: so all that stands at the left begins with `local` or `function`.

KEYSPACE. A queue's keys share the hash tag {namespace/queue}; its companion QUEUE/failed has the same tag. A call names
the ledger; in a cluster also all others that it may touch, so that none is touched while a slot is on its way.

  {ns/q}:ledger     string  what the queue knows of itself: see LEDGER
  {ns/q}:jobs       hash    id -> record
  {ns/q}:runs       hash    id -> the lease of a running job, and what may only exist while it runs
  {ns/q}:w0 .. :w9  zset    waiting, one per priority: arrival (8 bytes, big-endian) and id, by run_at
  {ns/q}:running    zset    id, by until_at
  {ns/q}:completed  zset    id, by forget_at; so :failed and :cancelled
  {ns/q}:wake       list    at most one token: there may be work
  {ns/q}:floor      string  the last stamp of a queue that was dropped; expires
  {ns/q}:call:CLIENT:VERB   string  that client's last number for this verb, and the reply; expires when idle
  {ns/q}:events, :to:CLIENT, :to:*  sharded channels, see `publish`
  {ns}:queues       set     names of queues; in a cluster it is on a node of its own, and the client calls `list`
  {ns}:workers      hash    worker -> what it announced;  {ns}:beats  zset  worker, by when that expires
  {ns}:layout       string  the layout version

RECORD. Times and stamps are microseconds in 8 bytes; `n + 1` with 0 for none. Little-endian, but for the first line: there
a plain record has the very bytes that its entry among the waiting begins with.

  flags B  priority B  generation I8  run_at I8
  [LONG]      arrival I8  wall_at I8  attempts I4 retries I4 stalls I4 timeouts I4  keep_ms+1 I8  keep_until_at I8
              #error+1 I4  #previous I4  #waiters I4   error  previous  waiters
  [FINISHED]  #outcome I4  outcome
  [TERMS]     #terms I2  terms
  payload

A record without LONG has arrival = generation and the rest 0. `attempts` leaves out the present run.
OUTCOME   state B  generation I8  ended_at I8  forget_at I8  dedup_at I8  #codec B  #result+1 I4  #error+1 I4
          codec  result  error
TERMS     result_ttl_ms+1 I8, and the rest of the work's options, which only clients read
RUN       flags B  fence I8  lease_ms I4  until_at I8  #worker I2  worker  [PROGRESS] #progress I4 progress  [NEXT] next
NEXT      generation I8  run_at I8  arrival I8  wall_at I8  takes_payload B  takes_run_at B  resets_counts B  priority B
          #terms I2  terms  payload
LEDGER    160 + layout B  last_at I8  last_stamp I8  skew I8  paused B  rebuilt B  priorities I2  forget_at I8  retrying i8
          deferred i8  the totals of the fifteen kinds i8 each  #steps B  steps (stamp I8  peak I8)  reason
]]

local LAYOUT, LAYOUT_MARK = 1, 160
local RESULT_TTL_MS, CANCELLED_TTL_MS, FAILURE_TTL_MS, WAITED_MS = 3600000, 60000, 604800000, 10000
local MAX_STALL_DELAY_MS = 300000
local DAMAGED = '{"type":"RecordDamaged","message":"the stored record could not be read","kind":"permanent"}'
local STEP_BACK_US, MAX_STEPS = 1000000, 8
local NEVER = 9007199254740991
local NO_TTLS = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
local SWEEP_ON_CLAIM, FORGET_ON_ENQUEUE, MEND_PASSES = 10, 2, 2
local MAX_CALL_BYTES = 1048576
local CALL_KEPT_MS, FLOOR_KEPT_MS = 600000, 2592000000
local MAX_WAITERS, WAITER_BYTES, MAX_INLINE_BYTES = 4, 12, 4096

local WAITING, RUNNING, COMPLETED, FAILED, CANCELLED = 1, 2, 3, 4, 5
local INDEXES = {[RUNNING] = ':running', [COMPLETED] = ':completed', [FAILED] = ':failed', [CANCELLED] = ':cancelled'}
local WAITING_INDEXES = {[0] = ':w0', ':w1', ':w2', ':w3', ':w4', ':w5', ':w6', ':w7', ':w8', ':w9'}
local PRIORITY_BITS = {[0] = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
local NEW, UPDATED, DEFERRED, DUPLICATE, CACHED = 1, 2, 3, 4, 5 -- what an enqueue did; 0: nothing
local KEEPS, TAKES, IF_LATER, IF_EARLIER = 0, 1, 2, 3 -- rules for run_at
local NOW, DELAY, WALL_TIME = 0, 1, 2 -- how a request says when
local COMPLETE, FAIL, RETRY, RELEASE = 1, 2, 3, 4 -- settlements
local KIND = {ENQUEUED = 1, UPDATED = 2, DEFERRED = 3, CLAIMED = 4, COMPLETED = 5, FAILED = 6, CANCELLED = 7, CANCEL_ASKED = 8,
  RETRIED = 9, TIMED_OUT = 10, STALLED = 11, RELEASED = 12, PROMOTED = 13, FORGOTTEN = 14, PURGED = 15}
local KINDS = 15
local ENDS = {[KIND.COMPLETED] = true, [KIND.FAILED] = true, [KIND.CANCELLED] = true, [KIND.PURGED] = true}
local ENDS_A_WAIT = {[KIND.COMPLETED] = true, [KIND.FAILED] = true, [KIND.CANCELLED] = true, [KIND.PURGED] = true,
  [KIND.CANCEL_ASKED] = true, [KIND.FORGOTTEN] = true}
local MAKES_READY = {[KIND.ENQUEUED] = true, [KIND.PROMOTED] = true, [KIND.UPDATED] = true, [KIND.RETRIED] = true,
  [KIND.TIMED_OUT] = true, [KIND.STALLED] = true, [KIND.RELEASED] = true}

local MARK, LONG, NAMED, PAYLOAD, FINISHED, TERMS = 160, 1, 2, 4, 8, 16 -- a record's flags; MARK is in all of them
local OVERDUE, CANCEL_ASKED, NEXT, PROGRESS = 1, 2, 4, 8 -- a run's flags

-- Set anew by `run` for every call, and nothing else outlives one: what the server offers, which is not there while it
-- loads a library, the arguments, the queue, the client, the time, and whether this server has all keys.
local call, pack, unpack_from, band, sub, byte, max, min
local ARGS, QUEUE, CLIENT, WALL, ALONE

local function wall_clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The time of a queue: _core/clock.py

local LAST_AT, LAST_STAMP, SKEW, PAUSED, REBUILT, PRIORITIES, FORGET_AT, RETRYING, DEFERRED_JOBS, TOTALS, STEPS, REASON =
  2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 26, 27
-- Where a ledger has what. The total of a kind is at TOTALS + kind. A queue's time is in its ledger: the first three.

local function tick(time)
  if WALL + time[SKEW] < time[LAST_AT] - STEP_BACK_US then
    local peak, higher = time[LAST_AT] - time[SKEW], {}
    for _, step in ipairs(time[STEPS]) do
      if step[2] > peak then higher[#higher + 1] = step end
    end
    higher[#higher + 1] = {time[LAST_STAMP], peak}
    if #higher > MAX_STEPS then table.remove(higher, 1) end
    time[STEPS], time[SKEW] = higher, time[LAST_AT] - WALL
  end
  time[LAST_AT] = max(WALL + time[SKEW], time[LAST_AT])
end

local function stamp(time)
  time[LAST_STAMP] = max(time[LAST_AT], time[LAST_STAMP] + 1)
  return time[LAST_STAMP]
end

local function place(time, run_at, wall_at, set_at)
  if wall_at == 0 then return run_at end
  for _, step in ipairs(time[STEPS]) do
    if set_at <= step[1] and wall_at <= step[2] then return run_at end
  end
  return wall_at + time[SKEW]
end

-- Records

local HEAD_BYTES, LONG_BYTES, LONG_FORM = 18, 60, '<I8I8I4I4I4I4I8I8I4I4I4'

local function pack_bytes(value)
  return value and #value + 1 or 0, value or ''
end

local function encode_outcome(outcome)
  if outcome.packed then return outcome.packed end
  local result_size, result = pack_bytes(outcome.result)
  local error_size, error = pack_bytes(outcome.error)
  outcome.packed = pack('<BI8I8I8I8BI4I4', outcome.state, outcome.generation, outcome.ended_at, outcome.forget_at,
    outcome.dedup_at, #outcome.codec, result_size, error_size) .. outcome.codec .. result .. error
  return outcome.packed
end

local function decode_outcome(packed)
  local outcome, codec_size, result_size, error_size, at = {}, nil, nil, nil, nil
  outcome.state, outcome.generation, outcome.ended_at, outcome.forget_at, outcome.dedup_at, codec_size, result_size,
    error_size, at = unpack_from('<BI8I8I8I8BI4I4', packed)
  outcome.codec = sub(packed, at, at + codec_size - 1)
  at = at + codec_size
  if result_size > 0 then
    outcome.result = sub(packed, at, at + result_size - 2)
    at = at + result_size - 1
  end
  if error_size > 0 then
    outcome.error = sub(packed, at, at + error_size - 2)
    at = at + error_size - 1
  end
  if at ~= #packed + 1 or not INDEXES[outcome.state] or max(outcome.generation, outcome.forget_at) > NEVER then
    error('garbled')
  end
  return outcome
end

local function encode_next(following)
  return pack('<I8I8I8I8BBBBI2', following.generation, following.run_at, following.arrival, following.wall_at,
    following.takes_payload and 1 or 0, following.takes_run_at, following.resets_counts and 1 or 0, following.priority,
    #following.terms) .. following.terms .. following.payload
end

local function decode_next(packed, at)
  local following, takes_payload, resets_counts, size = {}, nil, nil, nil
  following.generation, following.run_at, following.arrival, following.wall_at, takes_payload, following.takes_run_at,
    resets_counts, following.priority, size, at = unpack_from('<I8I8I8I8BBBBI2', packed, at)
  if max(following.generation, following.run_at, following.arrival, following.wall_at) > NEVER
    or following.priority > 9 or following.takes_run_at > IF_EARLIER or at + size - 1 > #packed then
    error('garbled')
  end
  following.takes_payload, following.resets_counts = takes_payload == 1, resets_counts == 1
  following.terms, following.payload = sub(packed, at, at + size - 1), sub(packed, at + size)
  return following
end

local function encode_run(run)
  local flags, progress, following = 0, '', ''
  if run.overdue then flags = flags + OVERDUE end
  if run.cancel_asked then flags = flags + CANCEL_ASKED end
  if run.progress then flags, progress = flags + PROGRESS, pack('<I4', #run.progress) .. run.progress end
  if run.next then flags, following = flags + NEXT, encode_next(run.next) end
  return pack('<BI8I4I8I2', flags, run.fence, run.lease_ms, run.until_at, #run.worker) .. run.worker .. progress .. following
end

local function decode_run(packed)
  local run, flags, size, at = {}, nil, nil, nil
  flags, run.fence, run.lease_ms, run.until_at, size, at = unpack_from('<BI8I4I8I2', packed)
  run.worker = sub(packed, at, at + size - 1)
  at = at + size
  if max(run.fence, run.until_at) > NEVER or at > #packed + 1 then error('garbled') end
  if flags ~= 0 then
    run.overdue, run.cancel_asked = band(flags, OVERDUE) ~= 0, band(flags, CANCEL_ASKED) ~= 0
    if band(flags, PROGRESS) ~= 0 then
      size, at = unpack_from('<I4', packed, at)
      run.progress = sub(packed, at, at + size - 1)
      at = at + size
    end
    if band(flags, NEXT) ~= 0 then run.next = decode_next(packed, at) end
  end
  return run
end

local function encode(job)
  local flags, middle = MARK, ''
  if job.named then flags = flags + NAMED end
  if job.has_payload then flags = flags + PAYLOAD end
  local attempts = job.run and job.attempts - 1 or job.attempts
  if job.arrival ~= job.generation or attempts ~= 0 or job.wall_at ~= 0 or job.retries ~= 0 or job.stalls ~= 0
    or job.timeouts ~= 0 or job.keep_ms or job.keep_until_at ~= 0 or job.error or job.previous or job.waiters ~= '' then
    local error_size, error = pack_bytes(job.error)
    local previous = job.previous and encode_outcome(job.previous) or ''
    flags = flags + LONG
    middle = pack(LONG_FORM, job.arrival, job.wall_at, attempts, job.retries, job.stalls, job.timeouts,
      (job.keep_ms or -1) + 1, job.keep_until_at, error_size, #previous, #job.waiters) .. error .. previous .. job.waiters
  end
  if job.outcome then
    local outcome = encode_outcome(job.outcome)
    flags, middle = flags + FINISHED, middle .. pack('<I4', #outcome) .. outcome
  end
  if job.terms ~= '' then flags, middle = flags + TERMS, middle .. pack('<I2', #job.terms) .. job.terms end
  local payload = job.has_payload and (job.payload or sub(job.raw, job.payload_at)) or ''
  return pack('>BBI8I8', flags, job.priority, job.generation, job.run_at) .. middle .. payload
end

local function decode_long(job, raw, at)
  local keep_ms, error_size, previous_size, waiters_size
  job.arrival, job.wall_at, job.attempts, job.retries, job.stalls, job.timeouts, keep_ms, job.keep_until_at, error_size,
    previous_size, waiters_size, at = unpack_from(LONG_FORM, raw, at)
  if max(job.arrival, job.wall_at, job.keep_until_at, keep_ms) > NEVER then error('garbled') end
  if keep_ms > 0 then job.keep_ms = keep_ms - 1 end
  if error_size > 0 then
    job.error = sub(raw, at, at + error_size - 2)
    at = at + error_size - 1
  end
  if previous_size > 0 then job.previous = decode_outcome(sub(raw, at, at + previous_size - 1)) end
  at = at + previous_size
  job.waiters = sub(raw, at, at + waiters_size - 1)
  return at + waiters_size
end

-- What a record has unless it says otherwise: most say nothing.
local BLANK = {__index = {wall_at = 0, attempts = 0, retries = 0, stalls = 0, timeouts = 0, keep_until_at = 0,
  waiters = '', terms = ''}}

local function decode(id, raw, run)
  local flags, priority, generation, run_at, at = unpack_from('>BBI8I8', raw)
  if flags < MARK or flags >= MARK + 32 or priority > 9 or max(generation, run_at) > NEVER then error('garbled') end
  local job = setmetatable({id = id, raw = raw, priority = priority, generation = generation, run_at = run_at,
    arrival = generation, payload_at = at, named = band(flags, NAMED) ~= 0, has_payload = band(flags, PAYLOAD) ~= 0}, BLANK)
  local size
  if band(flags, LONG) ~= 0 then at = decode_long(job, raw, at) end
  if band(flags, FINISHED) ~= 0 then
    size, at = unpack_from('<I4', raw, at)
    job.outcome = decode_outcome(sub(raw, at, at + size - 1))
    at = at + size
  end
  if band(flags, TERMS) ~= 0 then
    size, at = unpack_from('<I2', raw, at)
    job.terms = sub(raw, at, at + size - 1)
    at = at + size
  end
  if at > #raw + 1 then error('garbled') end
  job.payload_at = at
  if run then
    job.run = decode_run(run)
    job.attempts = job.attempts + 1
  end
  return job
end

-- The machine: _core/lifecycle.py. A function changes the job that it is given, says so in `changed`, and returns the job as
-- it shall be (nil: there is none any more) and what happened.

local machine = {}

function machine.damaged(id, now)
  return setmetatable({id = id, priority = 5, generation = now, run_at = now, arrival = now, named = false,
    has_payload = false, outcome = {state = FAILED, generation = now, ended_at = now,
      forget_at = now + 1000 * FAILURE_TTL_MS, dedup_at = 0, codec = 'json', error = DAMAGED}}, BLANK)
end

local function state_of(job)
  return job.outcome and job.outcome.state or job.run and RUNNING or WAITING
end

function machine.forgotten(job, now)
  return job.outcome and job.outcome.forget_at <= now
end

function machine.tidy(job, now)
  if job.previous and job.previous.forget_at <= now then job.previous = nil end
end

-- Whom to tell of this job's end: a few clients by name, more of them all together.
local function tell_at_end(job, client)
  if string.find(job.waiters, client, 1, true) or job.waiters == '*' then return end
  job.waiters = #job.waiters < MAX_WAITERS * WAITER_BYTES and job.waiters .. client or '*'
  job.changed = true
end

-- Somebody waits for this job: remember its end for long enough.
local function waited_for(job, request, now)
  if request.keep_ms == 0 then return end
  local until_at = now + 1000 * request.keep_ms
  if until_at > job.keep_until_at then job.keep_until_at, job.changed = until_at, true end
  tell_at_end(job, request.client)
end

local function due_of(request, time, at)
  if request.when == WALL_TIME then return {run_at = request.at + time[SKEW], arrival = at, wall_at = request.at} end
  local delay_ms = request.when == DELAY and request.at or 0
  return {run_at = time[LAST_AT] + 1000 * delay_ms, arrival = at, wall_at = 0}
end

-- Of two times, both as the corrected clock has them, the one that a rule takes.
local function choose(rule, old, new, time)
  local old_at, new_at = place(time, old.run_at, old.wall_at, old.arrival), place(time, new.run_at, new.wall_at, new.arrival)
  local takes_new = rule == TAKES or (rule == IF_LATER and new_at > old_at) or (rule == IF_EARLIER and new_at < old_at)
  local chosen = takes_new and new or old
  return {run_at = takes_new and new_at or old_at, arrival = chosen.arrival, wall_at = chosen.wall_at}
end

local function set_due(job, due)
  job.run_at, job.arrival, job.wall_at = due.run_at, due.arrival, due.wall_at
end

local function set_work(job, work)
  job.priority, job.terms, job.payload, job.has_payload = work.priority, work.terms, work.payload, true
end

local function reset_counts(job)
  job.retries, job.stalls, job.timeouts, job.error = 0, 0, 0, nil
end

-- A record for a generation that begins, of an id that was `before` (nil: there was none).
local function fresh(id, named, before)
  local job = setmetatable({id = id, named = named, changed = true, priority = 0, terms = '', payload = '',
    has_payload = true, generation = 0, run_at = 0, arrival = 0}, BLANK)
  if before then job.keep_until_at, job.waiters = before.keep_until_at, before.waiters end
  return job
end

local function start(job, request, time, at)
  local started = fresh(request.id, request.named, job)
  if job and request.updates and not request.takes_payload and job.has_payload then
    started.raw, started.payload_at = job.raw, job.payload_at
    set_work(started, job)
  else
    set_work(started, request)
  end
  started.generation = at
  if job then started.previous = job.outcome end
  set_due(started, due_of(request, time, at))
  waited_for(started, request, time[LAST_AT])
  return started, NEW, at, job and job.outcome.state or 0, KIND.ENQUEUED
end

local function enqueue_on_finished(job, request, time, at)
  local outcome = job.outcome
  if not request.updates and outcome.state == COMPLETED and time[LAST_AT] < outcome.dedup_at then
    return job, CACHED, outcome.generation, outcome.state
  end
  local takes_stored = request.updates and not request.takes_payload and job.has_payload
  if not takes_stored and not request.payload then return job, 0, 0, outcome.state end
  return start(job, request, time, at)
end

local function update_waiting(job, request, time, at)
  set_due(job, choose(request.rule, job, due_of(request, time, at), time))
  waited_for(job, request, time[LAST_AT])
  if request.takes_payload then set_work(job, request) end
  job.generation, job.changed = at, true
  if request.resets_counts then reset_counts(job) end
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

function machine.enqueue(job, request, time)
  local at = stamp(time)
  if job and machine.forgotten(job, time[LAST_AT]) then job = nil end
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

local function cancelled(job, now)
  local ttl_ms = RESULT_TTL_MS
  if job.terms ~= '' then
    local asked = unpack_from('<I8', job.terms)
    if asked > 0 then ttl_ms = asked - 1 end
  end
  return {state = CANCELLED, generation = job.generation, ended_at = now, dedup_at = 0, codec = 'json',
    forget_at = forget_at(job, max(ttl_ms, CANCELLED_TTL_MS), now)}
end

local function completed(job, settlement, now)
  local dedup_at = now + 1000 * (job.keep_ms or settlement.dedup_ttl_ms)
  return {state = COMPLETED, generation = job.generation, ended_at = now, dedup_at = dedup_at, codec = settlement.codec,
    result = settlement.result, forget_at = max(forget_at(job, settlement.result_ttl_ms, now), dedup_at)}
end

local function failed(job, settlement, now)
  return {state = FAILED, generation = job.generation, ended_at = now, dedup_at = 0, codec = 'json',
    error = settlement.error, forget_at = forget_at(job, settlement.failure_ttl_ms, now)}
end

-- The generation is over. What is in `next` takes its place, else the outcome is remembered for its time.
local function finish(job, outcome, kind, now)
  local following, remembered = job.run and job.run.next, outcome.forget_at > now
  if following then
    local promoted = fresh(job.id, job.named, job)
    set_work(promoted, following)
    set_due(promoted, following)
    promoted.generation = following.generation
    promoted.previous = remembered and outcome or job.previous
    return promoted, kind, KIND.PROMOTED, outcome
  end
  if not remembered then return nil, kind end
  if outcome.state == COMPLETED then job.has_payload = false end
  job.run, job.outcome, job.error, job.keep_ms, job.changed = nil, outcome, nil, nil, true
  return job, kind, nil, outcome
end

function machine.cancel(job, now)
  if not job or machine.forgotten(job, now) then return job, 'm' end
  if job.outcome then return job, 'f' end
  if not job.run then
    local after, kind, _, outcome = finish(job, cancelled(job, now), KIND.CANCELLED, now)
    return after, 'c', kind, outcome
  end
  if job.run.cancel_asked and not job.run.next then return job, 'a' end
  job.run.cancel_asked, job.run.next, job.run.changed = true, nil, true
  return job, 'a', KIND.CANCEL_ASKED
end

function machine.keep(job, ttl_ms, at_least, client, now)
  if not job or machine.forgotten(job, now) then return 'm' end
  local until_at = now + 1000 * ttl_ms
  job.changed = true
  if not job.outcome then
    if at_least then
      job.keep_until_at = max(job.keep_until_at, until_at)
      tell_at_end(job, client)
    else
      job.keep_ms = ttl_ms
    end
    return 'l'
  end
  if at_least then
    job.outcome.forget_at = max(job.outcome.forget_at, until_at)
  else
    job.outcome.dedup_at = job.outcome.state == COMPLETED and until_at or 0
    job.outcome.forget_at = max(until_at, job.keep_until_at)
  end
  return 'k'
end

function machine.claim(job, worker, lease_ms, time)
  job.run = {worker = worker, fence = stamp(time), lease_ms = lease_ms, until_at = time[LAST_AT] + 1000 * lease_ms,
    changed = true}
  job.attempts = job.attempts + 1
  return job, KIND.CLAIMED
end

function machine.follow_clock(job, time)
  job.run_at, job.changed = place(time, job.run_at, job.wall_at, job.arrival), true
end

function machine.holds(job, worker, fence)
  return job and job.run and job.run.fence == fence and job.run.worker == worker
end

function machine.extend(job, lease_ms, progress, now)
  local run = job.run
  run.lease_ms, run.until_at, run.overdue, run.changed = lease_ms, now + 1000 * lease_ms, false, true
  run.progress = progress or run.progress
end

-- The job waits again, with the settlement applied; now what is in `next` is merged in by its rules.
local function again(job, kind, time)
  local following = job.run.next
  job.run, job.changed = nil, true
  if following then
    set_due(job, choose(following.takes_run_at, job, following, time))
    if following.takes_payload then set_work(job, following) end
    job.generation = following.generation
    if following.resets_counts then reset_counts(job) end
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

function machine.settle(job, settlement, time)
  local now = time[LAST_AT]
  if settlement.kind == COMPLETE then return finish(job, completed(job, settlement, now), KIND.COMPLETED, now) end
  if job.run.cancel_asked then return finish(job, cancelled(job, now), KIND.CANCELLED, now) end
  if settlement.kind == FAIL then return finish(job, failed(job, settlement, now), KIND.FAILED, now) end
  if settlement.kind == RELEASE then return again(job, KIND.RELEASED, time) end
  counted(job, settlement, time)
  return again(job, RETRY_KINDS[settlement.counts], time)
end

function machine.take_back(job, time)
  local run = job.run
  if run.cancel_asked then return finish(job, cancelled(job, time[LAST_AT]), KIND.CANCELLED, time[LAST_AT]) end
  job.stalls = job.stalls + 1
  if job.stalls >= 2 then
    local delay_ms = min(run.lease_ms * 2 ^ min(job.stalls - 2, 30), MAX_STALL_DELAY_MS)
    job.run_at, job.arrival, job.wall_at = time[LAST_AT] + 1000 * delay_ms, stamp(time), 0
  end
  return again(job, KIND.STALLED, time)
end

function machine.expire(job, time)
  local run = job.run
  if not run.overdue then
    run.overdue, run.until_at, run.changed = true, time[LAST_AT] + 500 * run.lease_ms, true
    return job
  end
  return machine.take_back(job, time)
end

-- The books of a queue during one step: transaction.py. `save` alone touches the records and their indexes.

local function index_of(job)
  if job.outcome then return INDEXES[job.outcome.state], job.outcome.forget_at, job.id end
  if job.run then return ':running', job.run.until_at, job.id end
  return WAITING_INDEXES[job.priority], job.run_at, pack('>I8', job.arrival) .. job.id
end

local function view_of(job)
  if job.run then return job.run.next and DEFERRED_JOBS end
  return job.retries > 0 and not job.outcome and RETRYING
end

local function list_of(lists, key)
  local list = lists[key]
  if not list then
    list = {}
    lists[key] = list
  end
  return list
end

local function append(list, first, second)
  local size = #list
  list[size + 1], list[size + 2] = first, second
end

local NO_STEPS = {}

local function new_ledger(queue)
  local ledger = {LAYOUT_MARK + LAYOUT, 0, tonumber(call('GET', queue .. ':floor') or 0), 0, 0, 0, 0, NEVER, 0, 0}
  for kind = 1, KINDS do ledger[TOTALS + kind] = 0 end
  ledger[STEPS], ledger[REASON] = NO_STEPS, ''
  return ledger
end

local function newest_stamp(job)
  local newest = max(job.generation, job.arrival)
  for _, outcome in pairs({job.outcome, job.previous}) do newest = max(newest, outcome.generation) end
  if job.run then newest = max(newest, job.run.fence) end
  if job.run and job.run.next then newest = max(newest, job.run.next.generation, job.run.next.arrival) end
  return newest
end

-- A ledger that cannot be read is made anew from all the records: the one step that is as long as the queue.
local function rebuilt_ledger(queue)
  local ledger, cursor = new_ledger(queue), '0'
  local newest, live = max(WALL, ledger[LAST_STAMP]), 0
  repeat
    local page = call('HSCAN', queue .. ':jobs', cursor, 'COUNT', 500)
    cursor = page[1]
    for at = 1, #page[2], 2 do
      local ok, job = pcall(decode, page[2][at], page[2][at + 1], call('HGET', queue .. ':runs', page[2][at]))
      if ok then
        newest = max(newest, newest_stamp(job))
        local view = view_of(job)
        if view then ledger[view] = ledger[view] + 1 end
        if not job.outcome then live = live + 1 end
      end
    end
  until cursor == '0'
  ledger[LAST_AT], ledger[LAST_STAMP], ledger[PRIORITIES], ledger[FORGET_AT], ledger[REBUILT] = newest, newest, 1023, 0, 1
  ledger[TOTALS + KIND.ENQUEUED] = live
  return ledger
end

local LEDGER = '<BI8I8I8BBI2I8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8B'

local function decode_ledger(packed)
  local ledger = {unpack_from(LEDGER, packed)}
  local steps, at = ledger[STEPS], ledger[STEPS + 1]
  ledger[STEPS] = NO_STEPS
  if steps > 0 then
    ledger[STEPS] = {}
    for step = 1, steps do
      local set_at, peak
      set_at, peak, at = unpack_from('<I8I8', packed, at)
      ledger[STEPS][step] = {set_at, peak}
    end
  end
  ledger[REASON] = sub(packed, at)
  return ledger
end

local function read_ledger(queue)
  local packed = call('GET', queue .. ':ledger')
  if not packed then return nil end
  local layout = (byte(packed) or 0) - LAYOUT_MARK
  if layout > LAYOUT and layout < 32 then error({err = 'HOLDFAST_LAYOUT ' .. layout}) end
  local ok, ledger = pcall(decode_ledger, packed)
  return ok and layout == LAYOUT and ledger or rebuilt_ledger(queue)
end

local function write_ledger(queue, ledger)
  local steps, count, reason = '', #ledger[STEPS], ledger[REASON]
  for _, step in ipairs(ledger[STEPS]) do steps = steps .. pack('<I8I8', step[1], step[2]) end
  local kept = ledger[STEPS]
  ledger[STEPS] = count
  call('SET', queue .. ':ledger', pack(LEDGER, unpack(ledger, 1, STEPS)) .. steps .. reason)
  ledger[STEPS] = kept
end

local function books_of(queue, ledger, opened)
  local skew = ledger[SKEW]
  tick(ledger)
  return {queue = queue, ledger = ledger, time = ledger, now = ledger[LAST_AT], skew = skew, opened = opened, entries = {},
    changed = {}, writes = {zadd = {}, zrem = {}}}
end

-- The books of a queue that is there, else nil.
local function find(queue)
  local ledger = read_ledger(queue)
  return ledger and books_of(queue, ledger, 0)
end

-- Change the list of all queues, where this server has it: in the step that makes or drops one. In a cluster the client
-- does that, in a step of its own.
local function relist(command, queue)
  if not ALONE then return end
  local namespace, name, companion = string.match(queue, '^{([^/]*)/(.*)}(.*)$')
  call(command, '{' .. namespace .. '}:queues', name .. companion)
end

-- The books of a queue, which is made if need be.
local function open(queue)
  local ledger = read_ledger(queue)
  if ledger then return books_of(queue, ledger, 0) end
  ledger = new_ledger(queue)
  write_ledger(queue, ledger)
  relist('SADD', queue)
  return books_of(queue, ledger, 1)
end

local function count(books, view, by)
  if view then books.ledger[view] = books.ledger[view] + by end
end

-- A record that could not be read is taken for a failed one. It is counted among the failed when it was live, and
-- struck from every index that it may be in; an entry of a waiting one is struck when a claim meets it.
local function damaged_entry(books, id, run)
  local entry = {id = id, job = machine.damaged(id, books.now), ran = run and true, damaged = true}
  entry.live = not (call('ZSCORE', books.queue .. ':completed', id) or call('ZSCORE', books.queue .. ':failed', id)
    or call('ZSCORE', books.queue .. ':cancelled', id))
  return entry
end

local function entry_of(id, raw, run)
  local job = decode(id, raw, run)
  local key, score, member = index_of(job)
  return {id = id, job = job, key = key, score = score, member = member, ran = run and true, view = view_of(job)}
end

-- The records and the leases of these ids, as they are stored.
local function records(queue, ids)
  if #ids == 0 then return {}, {} end
  return call('HMGET', queue .. ':jobs', unpack(ids)), call('HMGET', queue .. ':runs', unpack(ids))
end

-- The entry of a record whose bytes were read, however they look.
local function enter(books, id, raw, run)
  local ok, entry = true, {id = id}
  if raw then ok, entry = pcall(entry_of, id, raw, run) end
  if not ok then entry = damaged_entry(books, id, run) end
  books.entries[id] = entry
  return entry
end

-- The records of these ids, each read once in a step.
local function load(books, ids)
  local entries, wanted = books.entries, {}
  for at = 1, #ids do
    if not entries[ids[at]] then wanted[#wanted + 1] = ids[at] end
  end
  local raws, runs = records(books.queue, wanted)
  for at = 1, #wanted do enter(books, wanted[at], raws[at], runs[at]) end
  return entries
end

local function listened_to(books)
  if books.listened == nil then books.listened = call('PUBSUB', 'SHARDNUMSUB', books.queue .. ':events')[2] > 0 end
  return books.listened
end

local function pack_event(kind, id, generation, run_at, outcome)
  local packed = outcome and encode_outcome(outcome) or ''
  if #packed > MAX_INLINE_BYTES then packed = '' end
  return pack('<BI8I8I4I4', kind, generation, run_at, #id, #packed) .. id .. packed
end

local function note(books, kind, id, generation, run_at, waiters, outcome)
  local ledger = books.ledger
  ledger[TOTALS + kind] = ledger[TOTALS + kind] + 1
  books.noted = true
  if MAKES_READY[kind] then books.ready = true end
  if listened_to(books) then
    local events = list_of(books, 'events')
    events[#events + 1] = pack_event(kind, id, generation, run_at)
  end
  if waiters ~= '' and ENDS_A_WAIT[kind] then
    append(list_of(books, 'notices'), waiters, pack_event(kind, id, generation, run_at, outcome))
  end
end

-- Note what a step did to a record.
local function put(books, entry, after, kind, then_kind, outcome)
  local before = entry.job
  if after ~= before or (after and (after.changed or (after.run and after.run.changed))) then
    entry.job = after
    if not entry.changed then
      entry.changed = true
      books.changed[#books.changed + 1] = entry
    end
  end
  if kind then
    local generation = ENDS[kind] and before and before.generation or after and after.generation or 0
    note(books, kind, entry.id, generation, after and after.run_at or 0, (before or after).waiters, outcome)
  end
  if then_kind then note(books, then_kind, entry.id, after.generation, after.run_at, '') end
end

-- Write a record anew, into the index that its state names, and out of all others.
local function mend(books, entry)
  entry.everywhere = true
  if entry.job then entry.job.changed = true end
  if not entry.changed then
    entry.changed = true
    books.changed[#books.changed + 1] = entry
  end
end

local function save(books, entry)
  local id, job, ledger, writes, key, score, member = entry.id, entry.job, books.ledger, books.writes, nil, nil, nil
  count(books, entry.view, -1)
  if entry.damaged or entry.everywhere then
    for state = RUNNING, CANCELLED do append(list_of(writes.zrem, INDEXES[state]), id) end
    if entry.live then ledger[TOTALS + KIND.FAILED] = ledger[TOTALS + KIND.FAILED] + 1 end
    if entry.damaged then ledger[LAST_STAMP] = max(ledger[LAST_STAMP], job and job.generation or 0) end
  end
  if job then
    key, score, member = index_of(job)
    count(books, view_of(job), 1)
    if job.changed then
      machine.tidy(job, books.now)
      append(list_of(writes, 'jobs'), id, encode(job))
    end
    if job.run and job.run.changed then append(list_of(writes, 'runs'), id, encode_run(job.run)) end
    if entry.ran and not job.run then append(list_of(writes, 'ended'), id) end
    if entry.key ~= key or entry.member ~= member or entry.score ~= score or entry.everywhere then
      append(list_of(writes.zadd, key), score, member)
    end
    if job.outcome then
      ledger[FORGET_AT] = min(ledger[FORGET_AT], score)
    elseif not job.run and band(ledger[PRIORITIES], PRIORITY_BITS[job.priority]) == 0 then
      ledger[PRIORITIES] = ledger[PRIORITIES] + PRIORITY_BITS[job.priority]
    end
  elseif entry.key or entry.damaged or entry.everywhere then
    append(list_of(writes, 'gone'), id)
    if entry.ran then append(list_of(writes, 'ended'), id) end
  end
  if entry.key and (entry.key ~= key or entry.member ~= member) then append(list_of(writes.zrem, entry.key), entry.member) end
end

local function flush(queue, writes)
  for key, members in pairs(writes.zrem) do call('ZREM', queue .. key, unpack(members)) end
  if writes.gone then call('HDEL', queue .. ':jobs', unpack(writes.gone)) end
  if writes.ended then call('HDEL', queue .. ':runs', unpack(writes.ended)) end
  if writes.jobs then call('HSET', queue .. ':jobs', unpack(writes.jobs)) end
  if writes.runs then call('HSET', queue .. ':runs', unpack(writes.runs)) end
  for key, places in pairs(writes.zadd) do call('ZADD', queue .. key, unpack(places)) end
end

-- Tell those who listen to the queue, and those who wait for one of its jobs: one message each for the whole step.
local function publish(books)
  if books.events then call('SPUBLISH', books.queue .. ':events', table.concat(books.events)) end
  local notices, inboxes = books.notices, {}
  for at = 1, notices and #notices or 0, 2 do
    local waiters, packed = notices[at], notices[at + 1]
    for place = 1, #waiters, WAITER_BYTES do
      append(list_of(inboxes, sub(waiters, place, place + WAITER_BYTES - 1)), packed)
    end
  end
  for client, packed in pairs(inboxes) do call('SPUBLISH', books.queue .. ':to:' .. client, table.concat(packed)) end
end

local function wake(books)
  if call('LLEN', books.queue .. ':wake') == 0 then call('LPUSH', books.queue .. ':wake', '1') end
end

-- Write what has changed. A step that changed nothing leaves no trace, not even in the queue's time, unless it was the
-- first to see the clock step back.
local function close(books)
  if #books.changed > 0 or books.noted then
    for at = 1, #books.changed do save(books, books.changed[at]) end
    flush(books.queue, books.writes)
    write_ledger(books.queue, books.ledger)
    publish(books)
    if books.ready then wake(books) end
  elseif books.time[SKEW] ~= books.skew then
    write_ledger(books.queue, books.ledger)
  end
end

-- What the indexes know

local function upto(books, state, limit)
  return call('ZRANGEBYSCORE', books.queue .. INDEXES[state], '-inf', books.now, 'LIMIT', 0, limit)
end

local function first_score(key)
  return tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end

local function priorities_of(books)
  local found = {}
  for priority = 9, 0, -1 do
    if band(books.ledger[PRIORITIES], PRIORITY_BITS[priority]) ~= 0 then found[#found + 1] = priority end
  end
  return found
end

local function next_run_at(books)
  local first
  for _, priority in ipairs(priorities_of(books)) do
    local score = first_score(books.queue .. WAITING_INDEXES[priority])
    if score and (not first or score < first) then first = score end
  end
  return first
end

local function next_sweep_at(books)
  return first_score(books.queue .. ':running')
end

local function sweep_some(books, ids, worker, overdue, stalled)
  if #ids == 0 then return end
  local entries = load(books, ids)
  for _, id in ipairs(ids) do
    local entry = entries[id]
    if not entry.job or not entry.job.run then
      mend(books, entry)
    else
      local after, kind, then_kind, outcome
      if worker then
        after, kind, then_kind, outcome = machine.take_back(entry.job, books.time)
      else
        after, kind, then_kind, outcome = machine.expire(entry.job, books.time)
      end
      put(books, entry, after, kind, then_kind, outcome)
      local list = kind and stalled or overdue
      list[#list + 1] = id
    end
  end
end

-- The leases of one worker, found by looking through all.
local function held_by(books, worker, limit)
  local found, at, ids = {}, 0, nil
  repeat
    ids = call('ZRANGE', books.queue .. ':running', at, at + 99)
    at = at + 100
    local runs = #ids > 0 and call('HMGET', books.queue .. ':runs', unpack(ids)) or {}
    for index, id in ipairs(ids) do
      local ok, run = pcall(decode_run, runs[index])
      if ok and run.worker == worker and #found < limit then found[#found + 1] = id end
    end
  until #ids < 100 or #found == limit
  return found
end

local function sweep(books, limit, worker)
  local overdue, stalled = {}, {}
  local ids = worker and held_by(books, worker, limit) or upto(books, RUNNING, limit)
  sweep_some(books, ids, worker, overdue, stalled)
  return overdue, stalled, #ids == limit
end

-- When the first finished record may have to be forgotten: the ledger's word is never too late, and seldom too early.
local function find_forget_at(books)
  books.ledger[FORGET_AT] = NEVER
  for state = COMPLETED, CANCELLED do
    books.ledger[FORGET_AT] = min(books.ledger[FORGET_AT], first_score(books.queue .. INDEXES[state]) or NEVER)
  end
end

local function sweep_forgotten(books, limit)
  if books.now < books.ledger[FORGET_AT] then return 0 end
  local ids = {}
  for state = COMPLETED, CANCELLED do
    if #ids < limit then
      for _, id in ipairs(upto(books, state, limit - #ids)) do ids[#ids + 1] = id end
    end
  end
  if #ids == 0 then
    find_forget_at(books)
    return 0
  end
  local entries = load(books, ids)
  for _, id in ipairs(ids) do
    local entry = entries[id]
    if entry.job and machine.forgotten(entry.job, books.now) then
      put(books, entry, nil, KIND.FORGOTTEN)
    else
      mend(books, entry)
    end
  end
  return #ids
end

-- Short cuts. Most jobs are new, run once, and are over. What the machine would do with them is plain, and is done without
-- taking records apart. A PLAIN record has no count, no error, no outcome, and nobody who waits.

local PLAIN, LIVE = {}, {}
for flags = MARK, MARK + 31 do
  LIVE[flags] = flags % 16 < 8
  PLAIN[flags] = flags % 2 == 0 and LIVE[flags]
end

local GONE, NO_RETRIES = {}, '\0\0\0\0'

-- A new id, due at once.
local function start_plain(books, request)
  local ledger, writes, id, terms, flags, middle = books.ledger, books.writes, request.id, request.terms, MARK + PAYLOAD, ''
  local at, priority = stamp(ledger), request.priority
  if request.named then flags = flags + NAMED end
  if request.keep_ms > 0 then
    flags = flags + LONG
    middle = pack(LONG_FORM, at, 0, 0, 0, 0, 0, 0, books.now + 1000 * request.keep_ms, 0, 0, #CLIENT) .. CLIENT
  end
  if terms ~= '' then
    flags = flags + TERMS
    middle = middle .. pack('<I2', #terms) .. terms
  end
  local record = pack('>BBI8I8', flags, priority, at, books.now) .. middle .. request.payload
  append(list_of(writes, 'jobs'), id, record)
  append(list_of(writes.zadd, WAITING_INDEXES[priority]), books.now, sub(record, 3, 10) .. id)
  if band(ledger[PRIORITIES], PRIORITY_BITS[priority]) == 0 then
    ledger[PRIORITIES] = ledger[PRIORITIES] + PRIORITY_BITS[priority]
  end
  note(books, KIND.ENQUEUED, id, at, books.now, '')
  return at
end

-- A record as it stands among the waiting, without a lease: does its entry answer for it, and is nothing to be counted?
local function is_plain(raw, run, index, member)
  if not raw or run or not LIVE[byte(raw, 1)] or WAITING_INDEXES[byte(raw, 2)] ~= index then return false end
  if PLAIN[byte(raw, 1)] then return sub(raw, 3, 10) == sub(member, 1, 8) end
  if #raw < HEAD_BYTES + LONG_BYTES or sub(raw, 39, 42) ~= NO_RETRIES then return false end -- where LONG has them
  local arrival, wall_at = unpack_from('<I8I8', raw, 19)
  return wall_at == 0 and pack('>I8', arrival) == sub(member, 1, 8)
end

local function claim_plain(books, id, raw, index, member, worker, lease_ms)
  local writes, fence, until_at = books.writes, stamp(books.time), books.now + 1000 * lease_ms
  append(list_of(writes, 'runs'), id, pack('<BI8I4I8I2', 0, fence, lease_ms, until_at, #worker) .. worker)
  append(list_of(writes.zadd, ':running'), until_at, id)
  append(list_of(writes.zrem, index), member)
  local generation, run_at = 0, 0
  if listened_to(books) then generation, run_at = unpack_from('>I8I8', raw, 3) end
  note(books, KIND.CLAIMED, id, generation, run_at, '')
  return fence
end

-- A completion by the holder of the lease, of a record that is live, without a `next`.
local function completes(raw, run, head, holder)
  return raw and run and byte(head, 1) == COMPLETE and LIVE[byte(raw, 1)] and band(byte(run, 1), NEXT) == 0
    and sub(head, 2, 9) == sub(run, 2, 9) and sub(run, 22, 21 + #holder) == holder
end

-- Complete a plain job that leaves nothing to remember.
local function complete_plain(books, id, raw)
  local writes = books.writes
  append(list_of(writes, 'gone'), id)
  append(list_of(writes, 'ended'), id)
  append(list_of(writes.zrem, ':running'), id)
  books.entries[id] = GONE
  local generation = listened_to(books) and unpack_from('>I8', raw, 3) or 0
  note(books, KIND.COMPLETED, id, generation, 0, '')
end

-- Complete a job that leaves an outcome, and may be waited for. False, and nothing is done, if there is more to it.
local function complete_remembered(books, id, raw, settlement)
  if #raw < (byte(raw, 1) % 2 == LONG and HEAD_BYTES + LONG_BYTES or HEAD_BYTES) or byte(raw, 2) > 9 then return false end
  local flags, priority, generation, run_at, at = unpack_from('>BBI8I8', raw)
  local arrival, wall_at, attempts, retries, stalls, timeouts, keep_until_at, waiters = generation, 0, 0, 0, 0, 0, 0, ''
  if flags % 2 == LONG then
    local keep_ms, error_size, previous_size, waiters_size
    arrival, wall_at, attempts, retries, stalls, timeouts, keep_ms, keep_until_at, error_size, previous_size, waiters_size, at =
      unpack_from(LONG_FORM, raw, at)
    if retries + keep_ms + error_size + previous_size > 0 then return false end
    waiters = sub(raw, at, at + waiters_size - 1)
    at = at + waiters_size
  end
  local terms = ''
  if band(flags, TERMS) ~= 0 then
    local size = at < #raw and unpack_from('<I2', raw, at) or #raw
    terms = sub(raw, at, at + 1 + size)
    at = at + 2 + size
  end
  if at > #raw + 1 or max(generation, run_at, arrival, wall_at, keep_until_at) > NEVER then return false end
  local outcome = completed({generation = generation, keep_until_at = keep_until_at}, settlement, books.now)
  if outcome.forget_at <= books.now then return false end
  local writes, packed = books.writes, encode_outcome(outcome)
  flags = MARK + LONG + FINISHED + band(flags, NAMED + TERMS)
  append(list_of(writes, 'jobs'), id, pack('>BBI8I8', flags, priority, generation, run_at)
    .. pack(LONG_FORM, arrival, wall_at, attempts + 1, 0, stalls, timeouts, 0, keep_until_at, 0, 0, #waiters) .. waiters
    .. pack('<I4', #packed) .. packed .. terms)
  append(list_of(writes, 'ended'), id)
  append(list_of(writes.zrem, ':running'), id)
  append(list_of(writes.zadd, ':completed'), outcome.forget_at, id)
  books.ledger[FORGET_AT] = min(books.ledger[FORGET_AT], outcome.forget_at)
  books.entries[id] = GONE
  note(books, KIND.COMPLETED, id, generation, run_at, waiters, outcome)
  return true
end

-- The verbs: engine.py. Arguments come after the verb, the client and its number.

local function read_request(head)
  local priority, has_payload, named, updates, takes_payload, rule, resets_counts, when, at, keep_ms =
    unpack_from('<BBBBBBBBI8I8', head)
  return {client = CLIENT, priority = priority, has_payload = has_payload == 1, named = named == 1, updates = updates == 1,
    takes_payload = takes_payload == 1, rule = rule, resets_counts = resets_counts == 1, when = when, at = at,
    keep_ms = keep_ms, id = '', terms = '', payload = nil}
end

local function enqueue_all(books, ids, requests, replies, outcomes)
  local raws, met, others = call('HMGET', books.queue .. ':jobs', unpack(ids)), {}, {}
  for at = 1, #ids do
    local id = ids[at]
    met[id] = raws[at] and true or met[id] ~= nil or books.entries[id] ~= nil
    if met[id] then others[#others + 1] = id end
  end
  if #others > 0 then load(books, others) end
  for at = 1, #ids do
    local id, request = ids[at], requests(at)
    if not met[id] and request.when == NOW and request.payload then
      replies[at] = pack('<BBI8', NEW, 0, start_plain(books, request))
    else
      local entry = books.entries[id] or enter(books, id)
      local after, placed, generation, state, kind = machine.enqueue(entry.job, request, books.time)
      put(books, entry, after, kind)
      replies[at] = pack('<BBI8', placed, state, generation)
      if placed == CACHED then outcomes[#outcomes + 1] = {at, encode_outcome(after.outcome), id, generation} end
    end
  end
end

local VERBS, REPEATS = {}, {}

function VERBS.enqueue()
  local ids, heads = {}, {}
  for at = 4, #ARGS, 4 do ids[#ids + 1] = ARGS[at] end
  local books = open(QUEUE)
  sweep_forgotten(books, FORGET_ON_ENQUEUE)
  local replies, outcomes = {}, {}
  enqueue_all(books, ids, function(at)
    local head = ARGS[4 * at + 1]
    local request = heads[head]
    if not request then
      request = read_request(head)
      heads[head] = request
    end
    request.id, request.terms = ids[at], ARGS[4 * at + 2]
    request.payload = request.has_payload and ARGS[4 * at + 3] or nil
    return request
  end, replies, outcomes)
  close(books)
  return {books.opened, table.concat(replies), outcomes}
end

-- A large outcome is not kept with the reply: it is read again, if the record still has it.
function REPEATS.enqueue(reply)
  for _, cached in ipairs(reply[3]) do
    if cached[2] == '' then
      local ok, job = pcall(decode, cached[3], call('HGET', QUEUE .. ':jobs', cached[3]))
      for _, outcome in pairs(ok and {job.previous, job.outcome} or {}) do
        if outcome.generation == cached[4] then cached[2] = encode_outcome(outcome) end
      end
    end
  end
  return reply
end

local function misplaced(job, time)
  return place(time, job.run_at, job.wall_at, job.arrival) ~= job.run_at
end

-- What looks due: the jobs that are, in parallel lists, and the entries that do not stand where they belong.
local function due(books, limit)
  local found, wrong = {ids = {}, raws = {}, indexes = {}, members = {}, entries = {}}, {}
  for _, priority in ipairs(priorities_of(books)) do
    local index, left, ids = WAITING_INDEXES[priority], limit - #found.ids, {}
    local members = left > 0 and call('ZRANGEBYSCORE', books.queue .. index, '-inf', books.now, 'LIMIT', 0, left) or {}
    for at = 1, #members do ids[at] = sub(members[at], 9) end
    local raws, runs = records(books.queue, ids)
    for at = 1, #ids do
      local id, member, entry = ids[at], members[at], nil
      if not is_plain(raws[at], runs[at], index, member) then
        entry = books.entries[id] or enter(books, id, raws[at], runs[at])
        local stray = entry.damaged or entry.key ~= index or entry.member ~= member
        if stray or misplaced(entry.job, books.time) then
          wrong[#wrong + 1] = {entry = entry, index = stray and index, member = member}
        end
      end
      local next_at = #found.ids + 1
      found.ids[next_at], found.raws[next_at], found.indexes[next_at] = id, raws[at], index
      found.members[next_at], found.entries[next_at] = member, entry or false
    end
  end
  return found, wrong
end

-- What is due, once what is next stands in its right place: a stepped clock, or damage, may have misplaced it. After a few
-- passes, what is still wrong is left out.
local function due_in_place(books, limit)
  for _ = 1, MEND_PASSES do
    local found, wrong = due(books, limit)
    if #wrong == 0 then return books, found end
    for _, found_wrong in ipairs(wrong) do
      local entry = found_wrong.entry
      if found_wrong.index then call('ZREM', books.queue .. found_wrong.index, found_wrong.member) end
      if entry.job and not entry.damaged and not entry.job.run and not entry.job.outcome then
        machine.follow_clock(entry.job, books.time)
        put(books, entry, entry.job)
      elseif entry.job then
        mend(books, entry)
      end
    end
    close(books)
    books = open(books.queue)
  end
  local found, wrong = due(books, limit)
  for _, found_wrong in ipairs(wrong) do books.entries[found_wrong.entry.id] = GONE end
  return books, found
end

function VERBS.claim()
  local limit, worker, lease_ms = tonumber(ARGS[4]), ARGS[5], tonumber(ARGS[6])
  local books = find(QUEUE)
  if not books then return {WALL, -1, -1, 0, {}, '', 0} end
  local sweep_at = next_sweep_at(books)
  local sweeps = sweep_at and sweep_at <= books.now
  if sweeps then sweep(books, SWEEP_ON_CLAIM) end
  sweep_forgotten(books, SWEEP_ON_CLAIM)
  if #books.changed > 0 then
    close(books)
    books = open(QUEUE)
  end
  local jobs, fences, size = {}, {}, 0
  if books.ledger[PAUSED] == 0 then
    local found
    books, found = due_in_place(books, limit)
    for at = 1, #found.ids do
      local id, raw, entry, fence = found.ids[at], found.raws[at], found.entries[at], nil
      if books.entries[id] ~= GONE then
        size = size + #raw - (entry and entry.job.payload_at or 18)
        if #fences > 0 and size > MAX_CALL_BYTES then break end
        if entry then
          put(books, entry, machine.claim(entry.job, worker, lease_ms, books.time))
          fence = entry.job.run.fence
        else
          fence = claim_plain(books, id, raw, found.indexes[at], found.members[at], worker, lease_ms)
        end
        append(jobs, id, raw)
        fences[#fences + 1] = pack('<I8', fence)
      end
    end
  end
  close(books)
  local run_at = books.ledger[PAUSED] == 0 and next_run_at(books)
  if run_at and run_at <= books.now then wake(books) end
  if sweeps then
    sweep_at = next_sweep_at(books)
  elseif #fences > 0 then
    sweep_at = min(sweep_at or NEVER, books.now + 1000 * lease_ms)
  end
  return {books.now, run_at or -1, sweep_at or -1, books.ledger[PAUSED], jobs, table.concat(fences), books.time[SKEW]}
end

-- A claim that is asked for again gives what it gave, less what is no longer held. Only ids and fences are kept.
function REPEATS.claim(reply)
  local jobs, fences = {}, {}
  for at = 1, #reply[5] do
    local id, fence = reply[5][at], sub(reply[6], 8 * at - 7, 8 * at)
    local raw, run = call('HGET', QUEUE .. ':jobs', id), call('HGET', QUEUE .. ':runs', id)
    if raw and run and sub(run, 2, 9) == fence then
      append(jobs, id, raw)
      fences[#fences + 1] = fence
    end
  end
  reply[5], reply[6] = jobs, table.concat(fences)
  return reply
end

local KEPT_AS = {
  enqueue = function(reply)
    if #reply[3] == 0 then return reply end
    local outcomes = {}
    for at, cached in ipairs(reply[3]) do
      outcomes[at] = {cached[1], #cached[2] > MAX_INLINE_BYTES and '' or cached[2], cached[3], cached[4]}
    end
    return {reply[1], reply[2], outcomes}
  end,
  claim = function(reply)
    local ids = {}
    for at = 1, #reply[5], 2 do ids[#ids + 1] = reply[5][at] end
    return {reply[1], reply[2], reply[3], reply[4], ids, reply[6], reply[7]}
  end,
}

local COUNTS = {'retries', 'stalls', 'timeouts'}

local function read_settlement(head, body, extra)
  local kind, fence, first, second, has_body, number = unpack_from('<BI8I8I8BB', head)
  local bytes = has_body == 1 and body or nil
  if kind == COMPLETE then
    return {kind = kind, fence = fence, result_ttl_ms = first, dedup_ttl_ms = second, result = bytes, codec = extra}
  elseif kind == FAIL then
    return {kind = kind, fence = fence, failure_ttl_ms = first, error = bytes, follow_up = extra ~= '' and extra}
  end
  return {kind = kind, fence = fence, delay_ms = first, run_at = second, error = bytes, counts = COUNTS[number]}
end

local function read_follow_up(id, packed)
  local priority, size, at = unpack_from('<BI2', packed)
  return {id = id, priority = priority, terms = sub(packed, at, at + size - 1), payload = sub(packed, at + size),
    named = true, updates = false, when = NOW, keep_ms = 0, client = CLIENT}
end

function VERBS.settle()
  local worker, ids, replies, follow_ups = ARGS[4], {}, {}, {}
  for at = 5, #ARGS, 4 do ids[#ids + 1] = ARGS[at] end
  local books = find(QUEUE)
  if not books then return {0, string.rep('0', #ids)} end
  local holder = pack('<I2', #worker) .. worker
  local raws, runs = records(QUEUE, ids)
  for at = 1, #ids do
    local id, head = ids[at], ARGS[4 * at + 2]
    local quickly = not books.entries[id] and completes(raws[at], runs[at], head, holder)
    local settlement
    if quickly and PLAIN[byte(raws[at], 1)] and sub(head, 10, 25) == NO_TTLS then
      complete_plain(books, id, raws[at])
    else
      settlement = read_settlement(head, ARGS[4 * at + 3], ARGS[4 * at + 4])
      if quickly and complete_remembered(books, id, raws[at], settlement) then settlement = nil end
    end
    if not settlement then
      replies[at] = '1'
    else
      local entry = books.entries[id] or enter(books, id, raws[at], runs[at])
      if machine.holds(entry.job, worker, settlement.fence) then
        local generation = entry.job.generation
        local after, kind, then_kind, outcome = machine.settle(entry.job, settlement, books.time)
        if settlement.follow_up and kind == KIND.FAILED then
          local follow_up_id = id .. '@' .. string.format('%.0f', generation)
          follow_ups[#follow_ups + 1] = read_follow_up(follow_up_id, settlement.follow_up)
        end
        put(books, entry, after, kind, then_kind, outcome)
        replies[at] = '1'
      else
        replies[at] = '0'
      end
    end
  end
  close(books)
  local opened = 0
  if #follow_ups > 0 then
    local companion, companion_ids = QUEUE .. '/failed', {}
    for at, request in ipairs(follow_ups) do companion_ids[at] = request.id end
    local companion_books = open(companion)
    enqueue_all(companion_books, companion_ids, function(at) return follow_ups[at] end, {}, {})
    close(companion_books)
    opened = companion_books.opened
  end
  return {opened, table.concat(replies)}
end

function VERBS.extend()
  local worker, lease_ms, ids, replies = ARGS[4], tonumber(ARGS[5]), {}, {}
  for at = 6, #ARGS, 3 do ids[#ids + 1] = ARGS[at] end
  local books = find(QUEUE)
  local entries = books and load(books, ids)
  for at, id in ipairs(ids) do
    local fence, progress = tonumber(ARGS[3 * at + 4]), ARGS[3 * at + 5]
    local entry = books and entries[id]
    if not entry or not machine.holds(entry.job, worker, fence) then
      replies[at] = 'l'
    else
      replies[at] = entry.job.run.cancel_asked and 'c' or 'k'
      machine.extend(entry.job, lease_ms, progress ~= '' and sub(progress, 2) or nil, books.now)
      put(books, entry, entry.job)
    end
  end
  if books then close(books) end
  return table.concat(replies)
end

function VERBS.cancel()
  local ids, replies = {}, {}
  for at = 4, #ARGS do ids[#ids + 1] = ARGS[at] end
  local books = find(QUEUE)
  if not books then return string.rep('m', #ids) end
  local entries = load(books, ids)
  for at, id in ipairs(ids) do
    local after, reply, kind, outcome = machine.cancel(entries[id].job, books.now)
    put(books, entries[id], after, kind, nil, outcome)
    replies[at] = reply
  end
  close(books)
  return table.concat(replies)
end

function VERBS.keep()
  local ttl_ms, at_least, ids, replies = tonumber(ARGS[4]), ARGS[5] == '1', {}, {}
  for at = 6, #ARGS do ids[#ids + 1] = ARGS[at] end
  local books = find(QUEUE)
  if not books then return string.rep('m', #ids) end
  local entries = load(books, ids)
  for at, id in ipairs(ids) do
    replies[at] = machine.keep(entries[id].job, ttl_ms, at_least, CLIENT, books.now)
    put(books, entries[id], entries[id].job)
  end
  close(books)
  return table.concat(replies)
end

function VERBS.pause()
  local found = read_ledger(QUEUE)
  local ledger = found or new_ledger(QUEUE)
  ledger[PAUSED], ledger[REASON] = tonumber(ARGS[4]), ARGS[5]
  write_ledger(QUEUE, ledger)
  if not found then relist('SADD', QUEUE) end
  return found and 0 or 1
end

function VERBS.sweep()
  local limit, worker = tonumber(ARGS[4]), ARGS[5] ~= '' and ARGS[5] or nil
  local books = find(QUEUE)
  if not books then return {{}, {}, 0, 0, -1} end
  local overdue, stalled, more = sweep(books, limit, worker)
  local gone = sweep_forgotten(books, limit)
  close(books)
  return {overdue, stalled, gone, (more or gone == limit) and 1 or 0, next_sweep_at(books) or -1}
end

-- The id that an entry of an index is about.
local function id_of(index, member)
  return string.find(index, '^:w') and sub(member, 9) or member
end

-- Delete the first records of an index. An entry that its record does not answer for is struck.
local function purge_index(books, index, limit)
  local key, ids = books.queue .. index, {}
  local members = call('ZRANGE', key, 0, limit - 1)
  if #members == 0 then return 0 end
  for at, member in ipairs(members) do ids[at] = id_of(index, member) end
  local entries = load(books, ids)
  for at, id in ipairs(ids) do
    local entry = entries[id]
    if entry.damaged or entry.key ~= index or entry.member ~= members[at] then call('ZREM', key, members[at]) end
    if entry.job and (entry.damaged or entry.key == index) then
      put(books, entry, nil, entry.job.outcome and KIND.FORGOTTEN or KIND.PURGED)
    end
  end
  return #members
end

local function purge_waiting(books, limit)
  local done = 0
  for _, priority in ipairs(priorities_of(books)) do
    if done < limit then done = done + purge_index(books, WAITING_INDEXES[priority], limit - done) end
  end
  return done
end

local function ask_to_cancel(books, limit)
  local asked, at, ids = 0, 0, nil
  repeat
    ids = call('ZRANGE', books.queue .. ':running', at, at + 99)
    at = at + 100
    local entries = #ids > 0 and load(books, ids)
    for _, id in ipairs(ids) do
      local job = entries[id].job
      if asked < limit and job and job.run and not job.run.cancel_asked then
        local after, _, kind = machine.cancel(job, books.now)
        put(books, entries[id], after, kind)
        asked = asked + 1
      end
    end
  until #ids < 100 or asked == limit
  return asked
end

local function drop(queue, ledger)
  call('SET', queue .. ':floor', string.format('%.0f', ledger[LAST_STAMP]), 'PX', FLOOR_KEPT_MS)
  local keys = {queue .. ':ledger', queue .. ':jobs', queue .. ':runs', queue .. ':wake'}
  for priority = 0, 9 do keys[#keys + 1] = queue .. WAITING_INDEXES[priority] end
  for state = RUNNING, CANCELLED do keys[#keys + 1] = queue .. INDEXES[state] end
  call('UNLINK', unpack(keys))
  relist('SREM', queue)
end

function VERBS.purge()
  local limit, drops, wanted, done = tonumber(ARGS[4]), ARGS[5] == '1', ARGS[6], 0
  local books = find(QUEUE)
  if not books then return {0, 0} end
  if string.find(wanted, WAITING, 1, true) then done = purge_waiting(books, limit) end
  for state = COMPLETED, CANCELLED do
    if done < limit and string.find(wanted, state, 1, true) then
      done = done + purge_index(books, INDEXES[state], limit - done)
    end
  end
  if done < limit and string.find(wanted, RUNNING, 1, true) then done = done + ask_to_cancel(books, limit - done) end
  close(books)
  if not drops or done > 0 or call('EXISTS', QUEUE .. ':jobs') == 1 then return {done, 0} end
  drop(QUEUE, books.ledger)
  return {done, 1}
end

-- Reading. What is read is decoded and judged by the client, with the queue's time beside it.

local function time_of(queue)
  local ledger = read_ledger(queue)
  if not ledger then return WALL, 0 end
  tick(ledger)
  return ledger[LAST_AT], ledger[SKEW], ledger
end

-- Of each queue, has it something for a worker: a job that is due, or a lease to take back?
function VERBS.ready()
  local told = {}
  for at = 4, #ARGS do
    local now, _, ledger = time_of(ARGS[at])
    local books = {queue = ARGS[at], ledger = ledger}
    local run_at = ledger and ledger[PAUSED] == 0 and next_run_at(books)
    local sweep_at = ledger and next_sweep_at(books)
    told[#told + 1] = ((run_at and run_at <= now) or (sweep_at and sweep_at <= now)) and '1' or '0'
  end
  return table.concat(told)
end

function VERBS.get()
  local ids = {}
  for at = 4, #ARGS do ids[#ids + 1] = ARGS[at] end
  local now, skew = time_of(QUEUE)
  local raws, runs = records(QUEUE, ids)
  return {now, skew, raws, runs}
end

-- The rank of the first entry behind a place in an index: there may be many with its score, and it may be gone.
local function rank_after(key, score, member)
  local low, high = call('ZCOUNT', key, '-inf', '(' .. score), call('ZCOUNT', key, '-inf', score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if call('ZRANGE', key, middle, middle)[1] > member then high = middle else low = middle + 1 end
  end
  return low
end

-- Entries of indexes, one index after the other, behind a place in the first: index, member, score, record, run.
function VERBS.page()
  local limit, score, member, found = tonumber(ARGS[4]), ARGS[5], ARGS[6], {}
  local now, skew, ledger = time_of(QUEUE)
  for at = 7, #ARGS do
    local index, left, ids = ARGS[at], limit - #found / 5, {}
    local key = QUEUE .. index
    local from = score == '' and 0 or rank_after(key, score, member)
    local members = left > 0 and call('ZRANGE', key, from, from + left - 1, 'WITHSCORES') or {}
    for place = 1, #members, 2 do ids[#ids + 1] = id_of(index, members[place]) end
    local raws, runs = records(QUEUE, ids)
    for place = 1, #ids do
      local last = #found
      found[last + 1], found[last + 2], found[last + 3] = index, members[2 * place - 1], members[2 * place]
      found[last + 4], found[last + 5] = raws[place], runs[place]
    end
    score = ''
  end
  return {now, skew, ledger and ledger[LAST_STAMP] or 0, found}
end

-- What the ledger and the sizes of the indexes say: for a snapshot, and for the audit to compare.
function VERBS.stats()
  local now, _, ledger = time_of(QUEUE)
  if not ledger then return false end
  local ready, scheduled, oldest = 0, 0, now
  for priority = 0, 9 do
    local key = QUEUE .. WAITING_INDEXES[priority]
    local due_here = call('ZCOUNT', key, '-inf', now)
    ready, scheduled = ready + due_here, scheduled + call('ZCARD', key) - due_here
    if due_here > 0 then
      local head = call('ZRANGE', key, 0, 0, 'WITHSCORES')
      local ok, job = pcall(decode, '', call('HGET', QUEUE .. ':jobs', sub(head[1], 9)))
      oldest = min(oldest, ok and max(job.run_at, job.generation) or now)
    end
  end
  local sizes, past = {}, {}
  for state = RUNNING, CANCELLED do
    local key = QUEUE .. INDEXES[state]
    sizes[#sizes + 1], past[#past + 1] = call('ZCARD', key), call('ZCOUNT', key, '-inf', now)
  end
  local totals = {}
  for kind = 1, KINDS do totals[kind] = ledger[TOTALS + kind] end
  return {now, ready, scheduled, oldest, sizes, past, ledger[RETRYING], ledger[DEFERRED_JOBS], ledger[PAUSED],
    ledger[REASON], totals, ledger[REBUILT], call('HLEN', QUEUE .. ':jobs'), call('HLEN', QUEUE .. ':runs'),
    ledger[LAST_STAMP]}
end

-- Records that do not stand in the index where they belong, and leases without a record, by a scan of all records, then
-- of all leases: the cursor to go on with, the ids, and how many were looked at.
function VERBS.unindexed()
  local at_runs, cursor, found = sub(ARGS[4], 1, 1) == 'r', string.gsub(ARGS[4], 'r', ''), {}
  local page = call('HSCAN', QUEUE .. (at_runs and ':runs' or ':jobs'), cursor, 'COUNT', 100)
  for at = 1, #page[2], 2 do
    local id = page[2][at]
    local raw, run = call('HGET', QUEUE .. ':jobs', id), call('HGET', QUEUE .. ':runs', id)
    local ok, entry = pcall(entry_of, id, raw, run)
    if not ok or (not at_runs and not call('ZSCORE', QUEUE .. entry.key, entry.member)) then found[#found + 1] = id end
  end
  local after = (at_runs and 'r' or '') .. page[1]
  if after == '0' then after = 'r0' elseif after == 'r0' then after = '0' end
  return {after, found, #page[2] / 2}
end

-- Repair, in fours: what is wrong, an entry or an id, the index, and the bytes that were seen. An `entry` is struck, and its
-- record put where it belongs; so is a `record`. What is `garbled` to a client is taken for failed, though it may seem sound
-- here, unless it is not what the client saw: a sound job may have the id by now.
function VERBS.mend()
  local books, ids = find(QUEUE), {}
  if not books then return 0 end
  for at = 4, #ARGS, 4 do
    local what, member, index, seen = ARGS[at], ARGS[at + 1], ARGS[at + 2], ARGS[at + 3]
    local id = what == 'record' and member or id_of(index, member)
    if what == 'garbled' then
      local raw, run = call('HGET', QUEUE .. ':jobs', id), call('HGET', QUEUE .. ':runs', id)
      if raw == seen or (raw and run and raw .. run == seen) then books.entries[id] = damaged_entry(books, id, run) end
    end
    if what ~= 'record' then call('ZREM', QUEUE .. index, member) end
    ids[#ids + 1] = id
  end
  local entries = load(books, ids)
  for _, id in ipairs(ids) do
    local entry = entries[id]
    if entry.job then
      books.time[LAST_STAMP] = max(books.time[LAST_STAMP], newest_stamp(entry.job))
      if entry.job.outcome and entry.ran then entry.job.run = nil end
      mend(books, entry)
    else
      call('HDEL', QUEUE .. ':runs', id)
    end
  end
  close(books)
  return #ids
end

-- Repair, at its end: the counts as the records have them, if nothing has happened since they were counted.
function VERBS.recount()
  local ledger = read_ledger(QUEUE)
  if not ledger then return 0 end
  local version = ledger[LAST_STAMP]
  for kind = 1, KINDS do version = version + ledger[TOTALS + kind] end
  if version ~= tonumber(ARGS[4]) then return 0 end
  ledger[RETRYING], ledger[DEFERRED_JOBS], ledger[REBUILT] = tonumber(ARGS[5]), tonumber(ARGS[6]), 0
  ledger[TOTALS + KIND.ENQUEUED] = ledger[TOTALS + KIND.ENQUEUED] + tonumber(ARGS[7])
  write_ledger(QUEUE, ledger)
  return 1
end

-- What a namespace shares. A full server lets this pass, too: a worker that begins must be able to drain it.

function VERBS.list()
  return call('SADD', QUEUE .. ':queues', ARGS[4])
end

function VERBS.layout()
  call('SET', QUEUE .. ':layout', ARGS[4], 'NX')
  return call('GET', QUEUE .. ':layout')
end

-- Workers: one record each for the whole namespace, on the wall clock.

function VERBS.announce()
  local worker, facts, ttl_ms = ARGS[4], ARGS[5], tonumber(ARGS[6])
  for _, gone in ipairs(call('ZRANGEBYSCORE', QUEUE .. ':beats', '-inf', WALL, 'LIMIT', 0, 10)) do
    call('ZREM', QUEUE .. ':beats', gone)
    call('HDEL', QUEUE .. ':workers', gone)
  end
  local known, evict = call('HGET', QUEUE .. ':workers', worker), 0
  if known and #known >= 17 then
    local _, expires_at, asked = unpack_from('<I8I8B', known)
    if expires_at > WALL then evict = asked end
  end
  local expires_at = WALL + 1000 * ttl_ms
  call('HSET', QUEUE .. ':workers', worker, pack('<I8I8B', WALL, expires_at, evict) .. facts)
  call('ZADD', QUEUE .. ':beats', expires_at, worker)
  return evict
end

function VERBS.evict()
  local known = call('HGET', QUEUE .. ':workers', ARGS[4])
  if not known or #known < 17 then return 0 end
  local beat_at, expires_at = unpack_from('<I8I8', known)
  if expires_at <= WALL then return 0 end
  call('HSET', QUEUE .. ':workers', ARGS[4], pack('<I8I8B', beat_at, expires_at, 1) .. sub(known, 18))
  return 1
end

function VERBS.workers()
  return {WALL, call('HGETALL', QUEUE .. ':workers')}
end

-- A call that changes something has a number. The same number gets the same reply again, a lower one is refused, and
-- neither changes anything: a reply may be lost, a first copy may arrive late.
local function once(verb, number)
  local key = QUEUE .. ':call:' .. CLIENT .. ':' .. verb
  local kept = call('GET', key)
  if kept then
    local last, at = unpack_from('<I8', kept)
    if number < last then return {err = 'HOLDFAST_SUPERSEDED'} end
    if number == last then
      local reply = cmsgpack.unpack(sub(kept, at))
      return REPEATS[verb] and REPEATS[verb](reply) or reply
    end
  end
  local reply = VERBS[verb]()
  local keeps = KEPT_AS[verb] and KEPT_AS[verb](reply) or reply
  call('SET', key, pack('<I8', number) .. cmsgpack.pack(keeps), 'PX', CALL_KEPT_MS)
  return reply
end

local function run(keys, args)
  call, pack, unpack_from, band, sub = redis.call, struct.pack, struct.unpack, bit.band, string.sub
  byte, max, min = string.byte, math.max, math.min
  ARGS, QUEUE, CLIENT, ALONE = args, sub(keys[1], 1, -8), args[2], #keys == 1 -- in a cluster, all keys are named
  WALL = wall_clock()
  if ARGS[3] == '' then return VERBS[ARGS[1]]() end
  return once(ARGS[1], tonumber(ARGS[3]))
end

-- One body, two functions: a full server refuses to enqueue, everything else runs, or nothing would drain.
redis.register_function {function_name = NAME .. '_enqueue', callback = run}
redis.register_function {function_name = NAME, callback = run, flags = {'allow-oom'}}
