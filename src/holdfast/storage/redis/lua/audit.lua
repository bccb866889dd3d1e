-- The verbs of the audit and of repair: see audit.py.

local ALL_PRIORITIES = 1023
local REPAIR_ARGS = 4 -- what is wrong, an id or the member of an index, the index, the bytes that were seen

-- The newest stamp that a record holds.
local function newest_stamp(job)
  local newest = max(job.generation, job.arrival)
  for _, outcome in pairs({job.outcome, job.previous}) do newest = max(newest, outcome.generation, outcome.started_at) end
  if job.run then newest = max(newest, job.run.fence) end
  if job.run and job.run.next then newest = max(newest, job.run.next.generation, job.run.next.arrival) end
  return newest
end

-- Return 1 if the metadata cannot be read. Unless this is a dry run, rebuild it from all records of the queue. This is the
-- only step whose length grows with the queue.
function VERBS.rebuild()
  if metadata.find(QUEUE) ~= false then return 0 end
  if ARGS[FIRST_ARG] == '1' then return 1 end
  local meta, cursor = metadata.new(QUEUE), '0'
  local newest, live = max(WALL, meta[LAST_STAMP]), 0
  repeat
    local page = call('HSCAN', QUEUE .. ':jobs', cursor, 'COUNT', 500)
    cursor = page[1]
    for at = 1, #page[2], 2 do
      local ok, job = pcall(record.decode, page[2][at], page[2][at + 1], call('HGET', QUEUE .. ':runs', page[2][at]))
      if ok then
        newest = max(newest, newest_stamp(job))
        local view = metadata.view_of(job)
        if view then meta[view] = meta[view] + 1 end
        if not job.outcome then live = live + 1 end
      end
    end
  until cursor == '0'
  meta[LAST_AT], meta[LAST_STAMP], meta[PRIORITIES], meta[FORGET_AT] = newest, newest, ALL_PRIORITIES, 0
  meta[TOTALS + KIND.ENQUEUED], meta[HAS_BRIEF] = live, 1
  metadata.write(QUEUE, meta)
  return 1
end

-- Scan all records, then all leases, for records that are not in their index and for leases without a record. Returns the
-- next cursor and the ids. A cursor with `r` is one of the leases.
function VERBS.unindexed()
  local at = ARGS[FIRST_ARG]
  local at_runs, cursor, found = sub(at, 1, 1) == 'r', string.gsub(at, 'r', ''), {}
  local page = call('HSCAN', QUEUE .. (at_runs and ':runs' or ':jobs'), cursor, 'COUNT', 100)
  for at = 1, #page[2], 2 do
    local id = page[2][at]
    local raw, run = call('HGET', QUEUE .. ':jobs', id), call('HGET', QUEUE .. ':runs', id)
    local ok, entry = pcall(transaction.entry_of, id, raw, run)
    if not ok or (not at_runs and not call('ZSCORE', QUEUE .. entry.key, entry.member)) then found[#found + 1] = id end
  end
  local after = (at_runs and 'r' or '') .. page[1]
  if after == '0' then after = 'r0' elseif after == 'r0' then after = '0' end
  return {after, found}
end

-- Repair what an audit found. `entry`: the member of an index is removed, and its record is written to the right index.
-- `record`: the record is written to the right index. `garbled`: the client cannot read the record, which counts as failed
-- from now on, unless it has changed since the client read it.
function VERBS.repair()
  local tx, ids = transaction.find(QUEUE), {}
  if not tx then return 0 end
  for at = FIRST_ARG, #ARGS, REPAIR_ARGS do
    local what, member, index, seen = ARGS[at], ARGS[at + 1], ARGS[at + 2], ARGS[at + 3]
    local id = what == 'record' and member or transaction.id_of(index, member)
    if what == 'garbled' then
      local raw, run = call('HGET', QUEUE .. ':jobs', id), call('HGET', QUEUE .. ':runs', id)
      if raw == seen or (raw and run and raw .. run == seen) then
        tx.entries[id] = transaction.damaged_entry(tx, id, run)
      end
    end
    if what ~= 'record' then call('ZREM', QUEUE .. index, member) end
    ids[#ids + 1] = id
  end
  local entries = transaction.load(tx, ids)
  for _, id in ipairs(ids) do
    local entry = entries[id]
    if entry.job then
      tx.time[LAST_STAMP] = max(tx.time[LAST_STAMP], newest_stamp(entry.job))
      if entry.job.outcome and entry.ran then entry.job.run = nil end
      for state = RUNNING, BRIEF do call('ZREM', QUEUE .. INDEXES[state], id) end
      entry.key, entry.job.changed = nil, true
      transaction.record_change(tx, entry, entry.job)
    else
      call('HDEL', QUEUE .. ':runs', id)
    end
  end
  transaction.close(tx)
  return #ids
end

-- The end of a repair: set the counts to those of the records, if nothing has happened since they were counted.
function VERBS.recount()
  local meta = metadata.read(QUEUE)
  if not meta then return 0 end
  local version = meta[LAST_STAMP] + meta[LAST_AT]
  for kind = 1, KINDS do version = version + meta[TOTALS + kind] end
  local counted_at, retrying, deferred, missing = unpack(ARGS, FIRST_ARG)
  if version ~= tonumber(counted_at) then return 0 end
  meta[RETRYING], meta[DEFERRED_JOBS] = tonumber(retrying), tonumber(deferred)
  meta[TOTALS + KIND.ENQUEUED] = meta[TOTALS + KIND.ENQUEUED] + tonumber(missing)
  metadata.write(QUEUE, meta)
  return 1
end
