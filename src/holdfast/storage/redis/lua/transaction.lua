-- The transaction of one queue during one step: mirrors storage/local/table.py. `tx` is a transaction, `entry` is a
-- record that the step has read, with the place that it had in the indexes. Only `save` changes records and their indexes,
-- apart from fast.lua.

local encode, decode, encode_run, encode_outcome = record.encode, record.decode, record.encode_run, record.encode_outcome
local view_of = metadata.view_of

-- The entry of a job that fast.lua has settled in this step.
transaction.REMOVED = {}

-- The index that a job is in: its key, its score and its member there.
local function index_of(job)
  if job.outcome then return INDEXES[job.outcome.state], job.outcome.forget_at, job.id end
  if job.run then return ':running', job.run.until_at, job.id end
  return WAITING_INDEXES[job.priority], job.run_at, pack('>I8', job.arrival) .. job.id
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

local function begin(queue, meta, opened)
  local noted_at, noted_skew = meta[LAST_AT], meta[SKEW]
  clock.tick(meta)
  return {queue = queue, meta = meta, time = meta, now = meta[LAST_AT], noted_at = noted_at, noted_skew = noted_skew, opened = opened, entries = {},
    changed = {}, writes = {zadd = {}, zrem = {}}}
end

-- The transaction of a queue, nil if there is no such queue.
function transaction.find(queue)
  local meta = metadata.read(queue)
  return meta and begin(queue, meta, 0)
end

-- Change the list of all queues in the step that makes or drops one. In a cluster another node has the list, and the client
-- changes it in a separate call.
function transaction.relist(command, queue)
  if not SINGLE_NODE then return end
  local namespace, name, companion = string.match(queue, '^{([^/]*)/(.*)}(.*)$')
  call(command, '{' .. namespace .. '}:queues', name .. companion)
end

-- The transaction of a queue. `close` makes the queue if it does not exist.
function transaction.open(queue)
  local meta = metadata.read(queue)
  if meta then return begin(queue, meta, 0) end
  return begin(queue, metadata.new(queue), 1)
end

local function count(tx, view, by)
  if view then tx.meta[view] = tx.meta[view] + by end
end

-- A record that cannot be read counts as failed. `save` adds it to the total of failed jobs if it was live.
local function damaged_entry(tx, id, run)
  local entry = {id = id, job = lifecycle.damaged(id, tx.now), ran = run and true, damaged = true}
  entry.live = true
  for state = COMPLETED, BRIEF do
    if call('ZSCORE', tx.queue .. INDEXES[state], id) then entry.live = false end
  end
  return entry
end

local function entry_of(id, raw, run)
  local job = decode(id, raw, run)
  local key, score, member = index_of(job)
  return {id = id, job = job, key = key, score = score, member = member, ran = run and true, view = view_of(job)}
end

-- The records and the leases of these ids as bytes, false where there is none.
local function records(queue, ids)
  if #ids == 0 then return {}, {} end
  return call('HMGET', queue .. ':jobs', unpack(ids)), call('HMGET', queue .. ':runs', unpack(ids))
end

-- The entry of a record whose bytes were read, readable or not.
local function enter(tx, id, raw, run)
  local ok, entry = true, {id = id}
  if raw then ok, entry = pcall(entry_of, id, raw, run) end
  if not ok then entry = damaged_entry(tx, id, run) end
  tx.entries[id] = entry
  return entry
end

-- The entries of these ids. A step reads each record once.
local function load(tx, ids)
  local entries, wanted = tx.entries, {}
  for at = 1, #ids do
    if not entries[ids[at]] then wanted[#wanted + 1] = ids[at] end
  end
  local raws, runs = records(tx.queue, wanted)
  for at = 1, #wanted do enter(tx, wanted[at], raws[at], runs[at]) end
  return entries
end

local function listened_to(tx)
  if tx.listened == nil then tx.listened = call('PUBSUB', 'SHARDNUMSUB', tx.queue .. ':events' .. DATABASE)[2] > 0 end
  return tx.listened
end

local function pack_event(kind, id, generation, run_at, outcome)
  local packed = outcome and encode_outcome(outcome) or ''
  if #packed > MAX_INLINE_BYTES then packed = '' end
  return pack('<BI8I8I4I4', kind, generation, run_at, #id, #packed) .. id .. packed
end

local function record_event(tx, kind, id, generation, run_at, waiters, outcome)
  local meta = tx.meta
  meta[TOTALS + kind] = meta[TOTALS + kind] + 1
  tx.noted = true
  if MAKES_READY[kind] then tx.ready = true end
  if listened_to(tx) then
    local events = list_of(tx, 'events')
    events[#events + 1] = pack_event(kind, id, generation, run_at)
  end
  if waiters ~= '' and ENDS_A_WAIT[kind] then
    local packed, inboxes = pack_event(kind, id, generation, run_at, outcome), list_of(tx, 'inboxes')
    for at = 1, #waiters, WAITER_BYTES do append(list_of(inboxes, sub(waiters, at, at + WAITER_BYTES - 1)), packed) end
  end
end

-- Keep a changed record to be written when the transaction closes, and count its events.
local function record_change(tx, entry, after, kind, then_kind, outcome)
  local before = entry.job
  if after ~= before or (after and (after.changed or (after.run and after.run.changed))) then
    entry.job = after
    if not entry.changed then
      entry.changed = true
      tx.changed[#tx.changed + 1] = entry
    end
  end
  if kind then
    local generation = ENDS[kind] and before and before.generation or after and after.generation or 0
    record_event(tx, kind, entry.id, generation, after and after.run_at or 0, (before or after).waiters, outcome)
  end
  if then_kind then record_event(tx, then_kind, entry.id, after.generation, after.run_at, '') end
end

-- Remove a member of an index that does not fit its record, so that no verb meets it again. A garbled record becomes a
-- failed one. Every other record stays unchanged: `repair` writes it to its index.
function transaction.remove_stray(tx, entry, index, member)
  call('ZREM', tx.queue .. index, member)
  if entry.damaged then
    entry.job.changed = true
    record_change(tx, entry, entry.job)
  end
end

local function save(tx, entry)
  local id, job, meta, writes, key, score, member = entry.id, entry.job, tx.meta, tx.writes, nil, nil, nil
  count(tx, entry.view, -1)
  if entry.damaged then
    for state = RUNNING, BRIEF do append(list_of(writes.zrem, INDEXES[state]), id) end
    if entry.live then meta[TOTALS + KIND.FAILED] = meta[TOTALS + KIND.FAILED] + 1 end
    meta[LAST_STAMP] = max(meta[LAST_STAMP], job and job.generation or 0)
  end
  if job then
    key, score, member = index_of(job)
    count(tx, view_of(job), 1)
    if job.changed then
      lifecycle.tidy(job, tx.now)
      append(list_of(writes, 'jobs'), id, encode(job))
    end
    if job.run and job.run.changed then append(list_of(writes, 'runs'), id, encode_run(job.run)) end
    if entry.ran and not job.run then append(list_of(writes, 'ended'), id) end
    if entry.key ~= key or entry.member ~= member or entry.score ~= score then
      append(list_of(writes.zadd, key), score, member)
    end
    if job.outcome then
      meta[FORGET_AT] = min(meta[FORGET_AT], score)
      if job.outcome.state == BRIEF then meta[HAS_BRIEF] = 1 end
    elseif not job.run and band(meta[PRIORITIES], PRIORITY_BITS[job.priority]) == 0 then
      meta[PRIORITIES] = meta[PRIORITIES] + PRIORITY_BITS[job.priority]
    end
  elseif entry.key or entry.damaged then
    append(list_of(writes, 'removed'), id)
    if entry.ran then append(list_of(writes, 'ended'), id) end
  end
  if entry.key and (entry.key ~= key or entry.member ~= member) then
    append(list_of(writes.zrem, entry.key), entry.member)
  end
end

local function flush(queue, writes)
  for key, members in pairs(writes.zrem) do call('ZREM', queue .. key, unpack(members)) end
  if writes.removed then call('HDEL', queue .. ':jobs', unpack(writes.removed)) end
  if writes.ended then call('HDEL', queue .. ':runs', unpack(writes.ended)) end
  if writes.jobs then call('HSET', queue .. ':jobs', unpack(writes.jobs)) end
  if writes.runs then call('HSET', queue .. ':runs', unpack(writes.runs)) end
  for key, places in pairs(writes.zadd) do call('ZADD', queue .. key, unpack(places)) end
end

-- Publish the events of the step to the listeners of the queue, and the ends of jobs to the clients that wait for them: one
-- message per channel. A message is a hint: a user without the permission to publish loses only the hint.
local function publish(tx)
  if tx.events then redis.pcall('SPUBLISH', tx.queue .. ':events' .. DATABASE, table.concat(tx.events)) end
  for client, packed in pairs(tx.inboxes or {}) do
    redis.pcall('SPUBLISH', tx.queue .. ':to:' .. client .. DATABASE, table.concat(packed))
  end
end

-- Leave a token for a waiting worker, which is a hint too.
local function wake(tx)
  if redis.pcall('LLEN', tx.queue .. ':wake') == 0 then redis.pcall('LPUSH', tx.queue .. ':wake', '1') end
end

-- Write the changes. A step without changes writes nothing but the time of the queue, if that needs a note.
function transaction.close(tx)
  if tx.opened == 1 then transaction.relist('SADD', tx.queue) end
  if #tx.changed > 0 or tx.noted then
    for at = 1, #tx.changed do save(tx, tx.changed[at]) end
    flush(tx.queue, tx.writes)
    metadata.write(tx.queue, tx.meta)
    publish(tx)
    if tx.ready then wake(tx) end
  elseif tx.opened == 1 then
    metadata.write(tx.queue, metadata.new(tx.queue))
  elseif clock.needs_note(tx.time, tx.noted_at, tx.noted_skew) then
    metadata.write(tx.queue, tx.meta)
  end
end

-- Reading the indexes

local function upto(tx, state, limit)
  return call('ZRANGEBYSCORE', tx.queue .. INDEXES[state], '-inf', tx.now, 'LIMIT', 0, limit)
end

local function score_at(key, rank)
  return tonumber(call('ZRANGE', key, rank, rank, 'WITHSCORES')[2])
end

local function first_score(key)
  return score_at(key, 0)
end

-- Whether a sweep deletes the record of an entry that it met in the index of `state`. A brief outcome may still have time.
local function is_to_forget(tx, entry, state)
  local outcome = entry.job and entry.job.outcome
  return outcome and (outcome.forget_at <= tx.now or (state == BRIEF and outcome.state == BRIEF))
end

-- Delete finished records whose time is over, at most `limit`, and the oldest brief ones if the queue would have more than
-- MAX_BRIEF with those that this step is `adding`. FORGET_AT is the earliest forget time of a record: it may be too early,
-- never too late. It is set again when no more records are past their time.
function transaction.sweep_forgotten(tx, limit, adding)
  local surplus = 0
  if adding and tx.meta[HAS_BRIEF] == 1 then
    local count = call('ZCARD', tx.queue .. ':brief')
    tx.meta[HAS_BRIEF], surplus = min(count, 1), count + adding - MAX_BRIEF
  end
  if tx.now < tx.meta[FORGET_AT] and surplus <= 0 then return 0 end
  local met, next_at = 0, NEVER
  for state = COMPLETED, BRIEF do
    local index, deleted = INDEXES[state], 0
    local ids = met < limit and upto(tx, state, limit - met) or {}
    if state == BRIEF and #ids < surplus then ids = call('ZRANGE', tx.queue .. index, 0, surplus - 1) end
    local raws, runs = records(tx.queue, ids)
    for at, id in ipairs(ids) do
      if not tx.entries[id] and fast.forgets(raws[at], runs[at], state, tx.now) then
        fast.forget_short(tx, id, index)
        deleted = deleted + 1
      else
        local entry = tx.entries[id] or enter(tx, id, raws[at], runs[at])
        if is_to_forget(tx, entry, state) then
          record_change(tx, entry, nil, KIND.FORGOTTEN)
          deleted = deleted + 1
        else
          transaction.remove_stray(tx, entry, index, id)
        end
      end
    end
    met = met + #ids
    if met < limit then next_at = min(next_at, score_at(tx.queue .. index, deleted) or NEVER) end
  end
  if met < limit then tx.meta[FORGET_AT] = next_at end
  return met
end

-- The id in a member of an index.
function transaction.id_of(index, member)
  return string.find(index, '^:w') and sub(member, ARRIVAL_BYTES + 1) or member
end

transaction.list_of, transaction.append, transaction.entry_of, transaction.records = list_of, append, entry_of, records
transaction.damaged_entry, transaction.enter, transaction.load = damaged_entry, enter, load
transaction.listened_to, transaction.record_event, transaction.record_change = listened_to, record_event, record_change
transaction.wake, transaction.first_score, transaction.upto = wake, first_score, upto
