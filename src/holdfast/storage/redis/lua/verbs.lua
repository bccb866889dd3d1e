-- The verbs that change jobs, except `enqueue`. Mirrors storage/local/engine.py.

local append, enter, record_change = transaction.append, transaction.enter, transaction.record_change
local ids_from, refuse, number, worker_name = arguments.ids, arguments.refuse, arguments.number, arguments.worker
local is_plain, claim_plain, completes, leaves_nothing = fast.is_plain, fast.claim_plain, fast.completes, fast.leaves_nothing
local complete_plain, complete_alike, complete_remembered = fast.complete_plain, fast.complete_alike, fast.complete_remembered
local MAX_CALL_BYTES, MAX_LOOKS = 1048576, 10
local SETTLEMENT, FOLLOW_UP, FENCE, FENCE_BYTES = '<BI8I8I8BB', '<BI2', '<I8', 8
local SETTLEMENT_ARGS, LEASE_ARGS = 4, 3 -- id, head, body, extra; id, fence, progress
local SETTLEMENT_BYTES, MAX_LIMIT, MAX_SWEEP, MAX_PAGE, MAX_REASON_BYTES = 27, 250, 100, 200, 2000
local MAX_MS, LAST_WALL_AT = arguments.MAX_MS, arguments.LAST_WALL_AT
local PAGE = leases.PAGE
local ALL_STATES = WAITING .. RUNNING .. COMPLETED .. FAILED .. CANCELLED
-- Positions in the reply to a claim. Jobs are in pairs: id, record.
local REPLY = {NOW = 1, NEXT_RUN_AT = 2, NEXT_SWEEP_AT = 3, PAUSED = 4, JOBS = 5, FENCES = 6, SKEW = 7}

-- Whether a claim can lease the record of this entry. If not, `passed_over` is set: a member that does not fit its record
-- is removed, and a job that is early because the clock has stepped moves to its time.
local function fits(tx, entry, index, member)
  if entry.damaged or entry.key ~= index or entry.member ~= member then
    transaction.remove_stray(tx, entry, index, member)
  elseif clock.place(tx.time, entry.job.run_at, entry.job.wall_at, entry.job.arrival) ~= entry.job.run_at then
    lifecycle.follow_clock(entry.job, tx.time)
    record_change(tx, entry, entry.job)
  else
    return true
  end
  tx.passed_over = true
  return false
end

-- The jobs that are due, in parallel lists.
local function due(tx, limit)
  local found = {ids = {}, raws = {}, indexes = {}, members = {}, entries = {}}
  for _, priority in ipairs(leases.priorities_of(tx)) do
    local index, left, ids = WAITING_INDEXES[priority], limit - #found.ids, {}
    local members = left > 0 and call('ZRANGEBYSCORE', tx.queue .. index, '-inf', tx.now, 'LIMIT', 0, left) or {}
    for at = 1, #members do ids[at] = sub(members[at], ARRIVAL_BYTES + 1) end
    local raws, runs = transaction.records(tx.queue, ids)
    for at = 1, #ids do
      local id, member, entry = ids[at], members[at], nil
      local claimable = is_plain(raws[at], runs[at], index, member)
      if not claimable then
        entry = tx.entries[id] or enter(tx, id, raws[at], runs[at])
        claimable = fits(tx, entry, index, member)
      end
      if claimable then
        local next_at = #found.ids + 1
        found.ids[next_at], found.raws[next_at], found.indexes[next_at] = id, raws[at], index
        found.members[next_at], found.entries[next_at] = member, entry or false
      end
    end
  end
  return found
end

function VERBS.claim()
  arguments.count(3)
  local limit, worker, lease_ms = unpack(ARGS, FIRST_ARG)
  limit, worker, lease_ms = number('the limit', limit, 1, MAX_LIMIT), worker_name(worker), arguments.lease(lease_ms)
  local tx = transaction.find(QUEUE)
  if not tx then return {WALL, -1, -1, 0, {}, '', 0} end
  local sweep_at = leases.next_sweep_at(tx)
  local sweeps = sweep_at and sweep_at <= tx.now
  if sweeps then leases.sweep(tx, SWEEP_ON_CLAIM) end
  transaction.sweep_forgotten(tx, SWEEP_ON_CLAIM)
  if #tx.changed > 0 then
    transaction.close(tx)
    tx = transaction.open(QUEUE)
  end
  local jobs, fences, size = {}, {}, 0
  if tx.meta[PAUSED] == 0 then
    local found = due(tx, limit)
    for _ = 1, MAX_LOOKS do
      if not tx.passed_over then break end -- Else others may be due in their places: look again.
      transaction.close(tx)
      tx = transaction.open(QUEUE)
      found = due(tx, limit)
    end
    for at = 1, #found.ids do
      local id, raw, entry, fence = found.ids[at], found.raws[at], found.entries[at], nil
      size = size + #raw - (entry and entry.job.payload_at - #entry.job.work_extension or ARRIVAL_AT - FLAGS_AT)
      if #fences > 0 and size > MAX_CALL_BYTES then break end
      if entry then
        record_change(tx, entry, lifecycle.claim(entry.job, worker, lease_ms, tx.time))
        fence = entry.job.run.fence
      else
        fence = claim_plain(tx, id, raw, found.indexes[at], found.members[at], worker, lease_ms)
      end
      append(jobs, id, raw)
      fences[#fences + 1] = pack(FENCE, fence)
    end
  end
  transaction.close(tx)
  local run_at = tx.meta[PAUSED] == 0 and leases.next_run_at(tx)
  if run_at and run_at <= tx.now then transaction.wake(tx) end
  if sweeps then
    sweep_at = leases.next_sweep_at(tx)
  elseif #fences > 0 then
    sweep_at = min(sweep_at or NEVER, tx.now + 1000 * lease_ms)
  end
  return {tx.now, run_at or -1, sweep_at or -1, tx.meta[PAUSED], jobs, table.concat(fences), tx.time[SKEW]}
end

-- A repeated claim returns the jobs of the first one that are still held under the same fence.
function REPEATS.claim(reply)
  local ids, jobs, fences = reply[REPLY.JOBS], {}, {}
  for at = 1, #ids do
    local id, fence = ids[at], sub(reply[REPLY.FENCES], FENCE_BYTES * (at - 1) + 1, FENCE_BYTES * at)
    local raw, run = call('HGET', QUEUE .. ':jobs', id), call('HGET', QUEUE .. ':runs', id)
    if raw and run and sub(run, FENCE_AT, LEASE_MS_AT - 1) == fence then
      append(jobs, id, raw)
      fences[#fences + 1] = fence
    end
  end
  reply[REPLY.JOBS], reply[REPLY.FENCES] = jobs, table.concat(fences)
  return reply
end

-- The server keeps only the ids and the fences of a claim.
function KEPT_AS.claim(reply)
  local ids, flat, kept = {}, reply[REPLY.JOBS], {unpack(reply)}
  for at = 1, #flat, 2 do ids[#ids + 1] = flat[at] end
  kept[REPLY.JOBS] = ids
  return kept
end

local PLUS = 43
local COUNTS = {'retries', 'stalls', 'timeouts'}

local function read_settlement(head, body, extra)
  if #head ~= SETTLEMENT_BYTES then refuse('the head of a settlement must have ' .. SETTLEMENT_BYTES .. ' bytes') end
  local kind, fence, first, second, has_body, counts = unpack_from(SETTLEMENT, head)
  if kind < COMPLETE or kind > RELEASE or has_body > 1 or counts > 3 or (kind == RETRY and counts == 0) then
    refuse('the head of a settlement has a code that does not exist')
  elseif fence > NEVER or first > MAX_MS or second > (kind == RETRY and LAST_WALL_AT or MAX_MS) then
    refuse('the head of a settlement has a number that is out of range')
  end
  local bytes = has_body == 1 and body or nil
  if kind == COMPLETE then
    arguments.codec(extra)
    return {kind = kind, fence = fence, result_ttl_ms = first, dedup_ttl_ms = second, result = bytes, codec = extra,
      brief = counts == 1}
  elseif kind == FAIL then
    return {kind = kind, fence = fence, failure_ttl_ms = first, dedup_ttl_ms = second, error = bytes,
      follow_up = extra ~= '' and extra, counts = COUNTS[counts]}
  end
  return {kind = kind, fence = fence, delay_ms = first, run_at = second, error = bytes, counts = COUNTS[counts]}
end

local function split_follow_up(packed)
  local priority, size, at = unpack_from(FOLLOW_UP, packed)
  local terms, extension = sub(packed, at, at + size - 1), ''
  at = at + size
  if priority >= EXTENDED then
    priority = priority - EXTENDED
    extension, at = record.sized_at('<I4', packed, at)
    arguments.extension(extension)
  end
  if priority > 9 or at > #packed + 1 then error('garbled') end
  if terms ~= '' then arguments.terms(terms) end
  return priority, terms, extension, at
end

local function read_follow_up(id, packed)
  local ok, priority, terms, extension, at = pcall(split_follow_up, packed)
  if not ok or sub(QUEUE, -7) == '/failed' then refuse('the follow-up of a failure is not valid') end
  return {id = id, priority = priority, terms = terms, work_extension = extension, payload = sub(packed, at),
    custom_id = true, updates = false, when = NOW, keep_ms = 0,
    starts_fast = fast.starts(NOW, true, extension ~= '')}
end

function VERBS.settle()
  local worker, first, replies, follow_ups = worker_name(ARGS[FIRST_ARG]), FIRST_ARG + 1, {}, {}
  local ids = ids_from(first, SETTLEMENT_ARGS)
  local tx = transaction.find(QUEUE)
  if not tx then return {0, string.rep('0', #ids)} end
  transaction.sweep_forgotten(tx, FORGET_PER_ITEM * #ids, #ids)
  local holder = pack('<I2', #worker) .. worker -- as a lease has it
  local raws, runs = transaction.records(QUEUE, ids)
  for at = 1, #ids do
    local id, head = ids[at], ARGS[first + 1]
    local quickly = not tx.entries[id] and completes(raws[at], runs[at], head, holder)
    local settlement
    if quickly and leaves_nothing(raws[at], head) then
      complete_plain(tx, id, raws[at])
    elseif not quickly or not complete_alike(tx, id, raws[at], head, ARGS[first + 3]) then
      settlement = read_settlement(head, ARGS[first + 2], ARGS[first + 3])
      if quickly and complete_remembered(tx, id, raws[at], head, settlement, worker) then settlement = nil end
    end
    if not settlement then
      replies[at] = '1'
    else
      local entry = tx.entries[id] or enter(tx, id, raws[at], runs[at])
      if lifecycle.holds(entry.job, worker, settlement.fence) then
        local generation = entry.job.generation
        local after, kind, then_kind, outcome = lifecycle.settle(entry.job, settlement, tx.time)
        if settlement.follow_up and kind == KIND.FAILED then
          local follow_up_id = id .. '@' .. string.format('%.0f', generation)
          follow_ups[#follow_ups + 1] = read_follow_up(follow_up_id, settlement.follow_up)
        end
        record_change(tx, entry, after, kind, then_kind, outcome)
        replies[at] = '1'
      else
        replies[at] = '0'
      end
    end
    first = first + SETTLEMENT_ARGS
  end
  if #follow_ups == 0 then
    transaction.close(tx)
    return {0, table.concat(replies)}
  end
  local companion, companion_ids = transaction.open(QUEUE .. '/failed'), {}
  for at, request in ipairs(follow_ups) do companion_ids[at] = request.id end
  enqueue.all(companion, companion_ids, function(at) return follow_ups[at] end, {}, {})
  transaction.close(tx) -- After all that may raise an error: an error must change nothing.
  transaction.close(companion)
  return {companion.opened, table.concat(replies)}
end

-- Apply `step` to the jobs of these ids. It gets the job (nil: there is none), the time and the number of the item. It
-- returns the job afterwards, the reply for the item, and the kind of event and the outcome if there are any. Every item
-- gets the reply `missing` if the queue does not exist.
local function change_each(ids, missing, step)
  local tx, replies = transaction.find(QUEUE), {}
  if not tx then return string.rep(missing, #ids) end
  local entries = transaction.load(tx, ids)
  for at, id in ipairs(ids) do
    local after, reply, kind, outcome = step(entries[id].job, tx.now, at)
    record_change(tx, entries[id], after, kind, nil, outcome)
    replies[at] = reply
  end
  transaction.close(tx)
  return table.concat(replies)
end

function VERBS.extend()
  local worker, lease_ms, first = worker_name(ARGS[FIRST_ARG]), arguments.lease(ARGS[FIRST_ARG + 1]), FIRST_ARG + 2
  return change_each(ids_from(first, LEASE_ARGS), 'l', function(job, now, at)
    local _, fence, progress = unpack(ARGS, first + LEASE_ARGS * (at - 1), first + LEASE_ARGS * at - 1)
    fence = number('a fence', fence, 0, NEVER)
    if progress ~= '' and byte(progress) ~= PLUS then refuse('progress must be empty, or + and a JSON value') end
    if not lifecycle.holds(job, worker, fence) then return job, 'l' end
    lifecycle.extend(job, lease_ms, progress ~= '' and sub(progress, 2) or nil, now)
    return job, job.run.cancel_asked and 'c' or 'k'
  end)
end

function VERBS.cancel()
  return change_each(ids_from(FIRST_ARG, 1), 'm', lifecycle.cancel)
end

function VERBS.keep()
  local ttl_ms, at_least = number('a length in ms', ARGS[FIRST_ARG], 0, MAX_MS), ARGS[FIRST_ARG + 1]
  at_least = number('at_least', at_least, 0, 1) == 1
  return change_each(ids_from(FIRST_ARG + 2, 1), 'm', function(job, now)
    return job, lifecycle.keep(job, ttl_ms, at_least, CLIENT, now)
  end)
end

function VERBS.prioritize()
  local priority = number('a priority', ARGS[FIRST_ARG], 0, 9)
  return change_each(ids_from(FIRST_ARG + 1, 1), 'n', function(job)
    return job, lifecycle.prioritize(job, priority)
  end)
end

function VERBS.pause()
  arguments.count(2)
  local paused = number('paused', ARGS[FIRST_ARG], 0, 1)
  if #ARGS[FIRST_ARG + 1] > MAX_REASON_BYTES then refuse('a reason has at most ' .. MAX_REASON_BYTES .. ' bytes') end
  local found = metadata.read(QUEUE)
  local meta = found or metadata.new(QUEUE)
  meta[PAUSED], meta[REASON] = paused, ARGS[FIRST_ARG + 1]
  metadata.write(QUEUE, meta)
  if not found then transaction.relist('SADD', QUEUE) end
  return found and 0 or 1
end

function VERBS.sweep()
  arguments.count(2)
  local limit, worker = number('the limit', ARGS[FIRST_ARG], 1, MAX_SWEEP), ARGS[FIRST_ARG + 1]
  worker = worker ~= '' and worker_name(worker) or nil
  local tx = transaction.find(QUEUE)
  if not tx then return {{}, {}, 0, 0, -1} end
  local overdue, stalled, more = leases.sweep(tx, limit, worker)
  local forgotten = transaction.sweep_forgotten(tx, limit)
  transaction.close(tx)
  return {overdue, stalled, forgotten, (more or forgotten == limit) and 1 or 0, leases.next_sweep_at(tx) or -1}
end

-- Delete the first records of an index. A member that does not fit its record is removed.
local function purge_index(tx, index, limit)
  local key, ids = tx.queue .. index, {}
  local members = call('ZRANGE', key, 0, limit - 1)
  if #members == 0 then return 0 end
  for at, member in ipairs(members) do ids[at] = transaction.id_of(index, member) end
  local entries = transaction.load(tx, ids)
  for at, id in ipairs(ids) do
    local entry = entries[id]
    if entry.damaged or entry.key ~= index or entry.member ~= members[at] then call('ZREM', key, members[at]) end
    if entry.job and (entry.damaged or entry.key == index) then
      record_change(tx, entry, nil, entry.job.outcome and KIND.FORGOTTEN or KIND.PURGED)
    end
  end
  return #members
end

local function ask_to_cancel(tx, limit)
  local asked, at, ids = 0, 0, nil
  repeat
    ids = call('ZRANGE', tx.queue .. ':running', at, at + PAGE - 1)
    at = at + PAGE
    local entries = #ids > 0 and transaction.load(tx, ids)
    for _, id in ipairs(ids) do
      local job = entries[id].job
      if asked < limit and job and job.run and not job.run.cancel_asked then
        local after, _, kind = lifecycle.cancel(job, tx.now)
        record_change(tx, entries[id], after, kind)
        asked = asked + 1
      end
    end
  until #ids < PAGE or asked == limit
  return asked
end

local function purge(tx, limit, wanted)
  local done, indexes = 0, {}
  if string.find(wanted, WAITING, 1, true) then
    for _, priority in ipairs(leases.priorities_of(tx)) do indexes[#indexes + 1] = WAITING_INDEXES[priority] end
  end
  for state = COMPLETED, CANCELLED do
    if string.find(wanted, state, 1, true) then
      indexes[#indexes + 1] = INDEXES[state]
      if state == COMPLETED then indexes[#indexes + 1] = INDEXES[BRIEF] end
    end
  end
  for _, index in ipairs(indexes) do
    if done < limit then done = done + purge_index(tx, index, limit - done) end
  end
  if done < limit and string.find(wanted, RUNNING, 1, true) then done = done + ask_to_cancel(tx, limit - done) end
  transaction.close(tx)
  return done
end

function VERBS.purge()
  arguments.count(2)
  local limit, wanted = number('the limit', ARGS[FIRST_ARG], 1, MAX_PAGE), ARGS[FIRST_ARG + 1]
  if string.find(wanted, '[^1-5]') then refuse('a state is a number from 1 to 5') end
  local tx = transaction.find(QUEUE)
  return tx and purge(tx, limit, wanted) or 0
end

function VERBS.drop()
  arguments.count(1)
  local limit, tx = number('the limit', ARGS[FIRST_ARG], 1, MAX_PAGE), transaction.find(QUEUE)
  if not tx then return 0 end
  purge(tx, limit, ALL_STATES)
  local left = call('HLEN', QUEUE .. ':jobs')
  if left > 0 then return left end
  call('SET', QUEUE .. ':floor', string.format('%.0f', tx.meta[LAST_STAMP]), 'PX', FLOOR_KEPT_MS)
  local keys = {QUEUE .. ':meta', QUEUE .. ':jobs', QUEUE .. ':runs', QUEUE .. ':wake'}
  for priority = 0, 9 do keys[#keys + 1] = QUEUE .. WAITING_INDEXES[priority] end
  for state = RUNNING, BRIEF do keys[#keys + 1] = QUEUE .. INDEXES[state] end
  call('UNLINK', unpack(keys))
  transaction.relist('SREM', QUEUE)
  return 0
end
