-- The metadata of a queue: counters, clock and pause state, in one string. A table with the fields by position: see LAST_AT
-- to REASON in keyspace.lua.

local META = '<BI8I8I8BBI2I8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8i8B'
local NO_STEPS = {}

-- The count that a job is part of: the field of the metadata, or false.
function metadata.view_of(job)
  if job.run then return job.run.next and DEFERRED_JOBS end
  return job.retries > 0 and not job.outcome and RETRYING
end

function metadata.new(queue)
  arguments.queue(queue)
  local meta = {LAYOUT_MARK + LAYOUT}
  for field = LAST_AT, TOTALS + KINDS do meta[field] = 0 end
  meta[LAST_STAMP], meta[FORGET_AT] = tonumber(call('GET', queue .. ':floor') or 0), NEVER
  meta[STEPS], meta[REASON] = NO_STEPS, ''
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

-- The metadata of a queue: nil if there is no such queue, false if it cannot be read. Another layout is refused.
function metadata.find(queue)
  local packed = call('GET', queue .. ':meta')
  if not packed then return nil end
  local layout = (byte(packed) or 0) - LAYOUT_MARK
  if layout ~= LAYOUT and layout > 0 and layout < 32 then error({err = 'HOLDFAST_LAYOUT ' .. layout}) end
  local ok, meta = pcall(decode, packed)
  return ok and layout == LAYOUT and meta
end

-- The same, but metadata that cannot be read is an error: only `rebuild` can replace it.
function metadata.read(queue)
  local meta = metadata.find(queue)
  if meta == false then error({err = 'HOLDFAST_METADATA ' .. queue}) end
  return meta
end

function metadata.write(queue, meta)
  local packed, steps = '', meta[STEPS]
  for _, step in ipairs(steps) do packed = packed .. pack('<I8I8', step[1], step[2]) end
  meta[STEPS] = #steps
  call('SET', queue .. ':meta', pack(META, unpack(meta, 1, STEPS)) .. packed .. meta[REASON])
  meta[STEPS] = steps
end
