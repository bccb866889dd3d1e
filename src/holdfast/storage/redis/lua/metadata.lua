-- The metadata of a queue: counters, clock and pause state, in one string. A table with the fields by position: see LAST_AT
-- to REASON in keyspace.lua.

local META = '<BI8I8I8BBI2I8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8B'
local ALL_PRIORITIES = 1023
local NO_STEPS = {}

-- The count that a job is part of: the field of the metadata, or false.
function metadata.view_of(job)
  if job.run then return job.run.next and DEFERRED_JOBS end
  return job.retries > 0 and not job.outcome and RETRYING
end

function metadata.new(queue)
  local meta = {LAYOUT_MARK + LAYOUT}
  for field = LAST_AT, TOTALS + KINDS do meta[field] = 0 end
  meta[LAST_STAMP], meta[FORGET_AT] = tonumber(call('GET', queue .. ':floor') or 0), NEVER
  meta[STEPS], meta[REASON] = NO_STEPS, ''
  return meta
end

-- The newest stamp that a record holds.
function metadata.newest_stamp(job)
  local newest = max(job.generation, job.arrival)
  for _, outcome in pairs({job.outcome, job.previous}) do newest = max(newest, outcome.generation) end
  if job.run then newest = max(newest, job.run.fence) end
  if job.run and job.run.next then newest = max(newest, job.run.next.generation, job.run.next.arrival) end
  return newest
end

-- Metadata that cannot be read is made from all records of the queue: the only step whose length grows with the queue.
local function rebuilt(queue)
  local meta, cursor = metadata.new(queue), '0'
  local newest, live = max(WALL, meta[LAST_STAMP]), 0
  repeat
    local page = call('HSCAN', queue .. ':jobs', cursor, 'COUNT', 500)
    cursor = page[1]
    for at = 1, #page[2], 2 do
      local ok, job = pcall(record.decode, page[2][at], page[2][at + 1], call('HGET', queue .. ':runs', page[2][at]))
      if ok then
        newest = max(newest, metadata.newest_stamp(job))
        local view = metadata.view_of(job)
        if view then meta[view] = meta[view] + 1 end
        if not job.outcome then live = live + 1 end
      end
    end
  until cursor == '0'
  meta[LAST_AT], meta[LAST_STAMP], meta[PRIORITIES], meta[FORGET_AT] = newest, newest, ALL_PRIORITIES, 0
  meta[REBUILT] = 1
  meta[TOTALS + KIND.ENQUEUED] = live
  return meta
end

local function decode(packed)
  local meta = {unpack_from(META, packed)}
  local steps, at = meta[STEPS], meta[STEPS + 1]
  meta[STEPS] = NO_STEPS
  if steps > 0 then
    meta[STEPS] = {}
    for step = 1, steps do
      local set_at, peak
      set_at, peak, at = unpack_from('<I8I8', packed, at)
      meta[STEPS][step] = {set_at, peak}
    end
  end
  meta[REASON] = sub(packed, at)
  return meta
end

-- The metadata of a queue, nil if there is no such queue. Another layout is refused.
function metadata.read(queue)
  local packed = call('GET', queue .. ':meta')
  if not packed then return nil end
  local layout = (byte(packed) or 0) - LAYOUT_MARK
  if layout ~= LAYOUT and layout > 0 and layout < 32 then error({err = 'HOLDFAST_LAYOUT ' .. layout}) end
  local ok, meta = pcall(decode, packed)
  return ok and layout == LAYOUT and meta or rebuilt(queue)
end

function metadata.write(queue, meta)
  local steps, count, reason = '', #meta[STEPS], meta[REASON]
  for _, step in ipairs(meta[STEPS]) do steps = steps .. pack('<I8I8', step[1], step[2]) end
  local kept = meta[STEPS]
  meta[STEPS] = count
  call('SET', queue .. ':meta', pack(META, unpack(meta, 1, STEPS)) .. steps .. reason)
  meta[STEPS] = kept
end
