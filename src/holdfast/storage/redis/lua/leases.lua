-- Due jobs and expired leases, which claims and sweeps read from the indexes. Mirrors the part of storage/local/table.py
-- that an enqueue does not need.

local append, first_score = transaction.append, transaction.first_score
local PAGE = 100
leases.PAGE = PAGE -- leases that are read at a time

local LISTS = {} -- of priorities, by their bits

-- The priorities that waiting jobs may have, highest first.
function leases.priorities_of(tx)
  local bits = tx.meta[PRIORITIES]
  if not LISTS[bits] then
    LISTS[bits] = {}
    for priority = 9, 0, -1 do
      if band(bits, PRIORITY_BITS[priority]) ~= 0 then append(LISTS[bits], priority) end
    end
  end
  return LISTS[bits]
end

function leases.next_run_at(tx)
  local first
  for _, priority in ipairs(leases.priorities_of(tx)) do
    local score = first_score(tx.queue .. WAITING_INDEXES[priority])
    if score and (not first or score < first) then first = score end
  end
  return first
end

function leases.next_sweep_at(tx)
  return first_score(tx.queue .. ':running')
end

-- The ids of one worker's leases, found by reading all leases.
local function held_by(tx, worker, limit)
  local found, at, ids = {}, 0, nil
  repeat
    ids = call('ZRANGE', tx.queue .. ':running', at, at + PAGE - 1)
    at = at + PAGE
    local runs = #ids > 0 and call('HMGET', tx.queue .. ':runs', unpack(ids)) or {}
    for index, id in ipairs(ids) do
      local ok, run = pcall(record.decode_run, runs[index])
      if ok and run.worker == worker and #found < limit then found[#found + 1] = id end
    end
  until #ids < PAGE or #found == limit
  return found
end

-- Take back expired leases, or all leases of one worker. Returns the ids that are overdue, the ids that were taken back,
-- and whether there may be more.
function leases.sweep(tx, limit, worker)
  local overdue, stalled = {}, {}
  local ids = worker and held_by(tx, worker, limit) or transaction.upto(tx, RUNNING, limit)
  local entries, end_lease = transaction.load(tx, ids), worker and lifecycle.take_back or lifecycle.expire
  for _, id in ipairs(ids) do
    local entry = entries[id]
    if not entry.job or not entry.job.run or entry.job.outcome then
      transaction.remove_stray(tx, entry, ':running', id)
    else
      local after, kind, then_kind, outcome = end_lease(entry.job, tx.time)
      transaction.record_change(tx, entry, after, kind, then_kind, outcome)
      local list = kind and stalled or overdue
      list[#list + 1] = id
    end
  end
  return overdue, stalled, #ids == limit
end
