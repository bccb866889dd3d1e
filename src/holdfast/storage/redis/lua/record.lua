-- Records, leases and outcomes as bytes: mirrors codec.py. The formats are at the head of keyspace.lua.

local OUTCOME, NEXT_HEAD, ENTRY = '<BI8I8I8I8I8I2BI4I4', '<I8I8I8I8BBBBI2', '<BI4'
local FIRST_WORK_TAG = 128

-- Bytes behind their size, which has the format `form`, and the first position behind them.
local function sized_at(form, packed, at)
  local size
  size, at = unpack_from(form, packed, at)
  if at + size > #packed + 1 then error('garbled') end
  return sub(packed, at, at + size - 1), at + size
end

-- Bytes whose size is stored plus one, nil for 0, and the first position behind them.
local function bytes_at(packed, at, size)
  if size == 0 then return nil, at end
  return sub(packed, at, at + size - 2), at + size - 1
end

-- The same for writing: the size plus one, and the bytes.
local function pack_bytes(value)
  return value and #value + 1 or 0, value or ''
end

local function encode_outcome(outcome)
  if outcome.packed then return outcome.packed end
  local result_size, result = pack_bytes(outcome.result)
  local error_size, error = pack_bytes(outcome.error)
  outcome.packed = pack(OUTCOME, outcome.state, outcome.generation, outcome.started_at, outcome.ended_at, outcome.forget_at,
    outcome.dedup_at, #outcome.worker, #outcome.codec, result_size, error_size) .. outcome.worker .. outcome.codec .. result
    .. error
  return outcome.packed
end

local function decode_outcome(packed)
  local outcome, worker_size, codec_size, result_size, error_size, at = {}, nil, nil, nil, nil, nil
  outcome.state, outcome.generation, outcome.started_at, outcome.ended_at, outcome.forget_at, outcome.dedup_at, worker_size,
    codec_size, result_size, error_size, at = unpack_from(OUTCOME, packed)
  outcome.worker = sub(packed, at, at + worker_size - 1)
  at = at + worker_size
  outcome.codec = sub(packed, at, at + codec_size - 1)
  at = at + codec_size
  outcome.result, at = bytes_at(packed, at, result_size)
  outcome.error, at = bytes_at(packed, at, error_size)
  if at ~= #packed + 1 or not INDEXES[outcome.state] or max(outcome.generation, outcome.started_at, outcome.forget_at) > NEVER then
    error('garbled')
  end
  return outcome
end

-- Split an extension: return the entries of the job, and those of the work.
local function split_extension(packed)
  local at, last, work_at = 1, 0, nil
  while at <= #packed do
    local tag, size, value_at = unpack_from(ENTRY, packed, at)
    if tag <= last or value_at + size > #packed + 1 then error('garbled') end
    if tag >= FIRST_WORK_TAG and not work_at then work_at = at end
    last, at = tag, value_at + size
  end
  work_at = work_at or at
  return sub(packed, 1, work_at - 1), sub(packed, work_at)
end

local function encode_next(following)
  local takes_payload, extension = following.takes_payload and 1 or 0, following.work_extension
  if extension ~= '' then takes_payload, extension = takes_payload + EXTENDED, pack('<I4', #extension) .. extension end
  return pack(NEXT_HEAD, following.generation, following.run_at, following.arrival, following.wall_at, takes_payload,
    following.takes_run_at, following.resets_counts and 1 or 0, following.priority, #following.terms) .. following.terms
    .. extension .. following.payload
end

local function decode_next(packed, at)
  local following, takes_payload, resets_counts, size = {}, nil, nil, nil
  following.generation, following.run_at, following.arrival, following.wall_at, takes_payload, following.takes_run_at,
    resets_counts, following.priority, size, at = unpack_from(NEXT_HEAD, packed, at)
  if max(following.generation, following.run_at, following.arrival, following.wall_at) > NEVER
    or following.priority > 9 or following.takes_run_at > IF_EARLIER or at + size - 1 > #packed then
    error('garbled')
  end
  following.takes_payload, following.resets_counts = takes_payload % 2 == 1, resets_counts == 1
  following.terms, following.work_extension = sub(packed, at, at + size - 1), ''
  at = at + size
  if band(takes_payload, EXTENDED) ~= 0 then
    local extension, job_entries
    extension, at = sized_at('<I4', packed, at)
    job_entries, following.work_extension = split_extension(extension)
    if job_entries ~= '' then error('garbled') end
  end
  following.payload = sub(packed, at)
  return following
end

local function encode_run(run)
  local flags, progress, following = 0, '', ''
  if run.overdue then flags = flags + OVERDUE end
  if run.cancel_asked then flags = flags + CANCEL_ASKED end
  if run.progress then flags, progress = flags + PROGRESS, pack('<I4', #run.progress) .. run.progress end
  if run.next then flags, following = flags + NEXT, encode_next(run.next) end
  return pack(LEASE, flags, run.fence, run.lease_ms, run.until_at, #run.worker) .. run.worker .. progress .. following
end

local function decode_run(packed)
  local run, flags, size, at = {}, nil, nil, nil
  flags, run.fence, run.lease_ms, run.until_at, size, at = unpack_from(LEASE, packed)
  run.worker = sub(packed, at, at + size - 1)
  at = at + size
  if max(run.fence, run.until_at) > NEVER or at > #packed + 1 then error('garbled') end
  if flags ~= 0 then
    run.overdue, run.cancel_asked = band(flags, OVERDUE) ~= 0, band(flags, CANCEL_ASKED) ~= 0
    if band(flags, PROGRESS) ~= 0 then run.progress, at = sized_at('<I4', packed, at) end
    if band(flags, NEXT) ~= 0 then run.next = decode_next(packed, at) end
  end
  return run
end

local function encode(job)
  local flags, middle = MARK, ''
  if job.custom_id then flags = flags + CUSTOM_ID end
  if job.has_payload then flags = flags + PAYLOAD end
  local ran = job.run or (job.outcome and job.outcome.started_at > 0)
  local attempts = ran and job.attempts - 1 or job.attempts
  if job.arrival ~= job.generation or attempts ~= 0 or job.wall_at ~= 0 or job.retries ~= 0 or job.stalls ~= 0
    or job.timeouts ~= 0 or job.keep_ms or job.keep_until_at ~= 0 or job.error or job.previous or job.waiters ~= '' then
    local error_size, error = pack_bytes(job.error)
    local previous = job.previous and encode_outcome(job.previous) or ''
    flags = flags + LONG
    middle = pack(LONG_PART, job.arrival, job.wall_at, attempts, job.retries, job.stalls, job.timeouts,
      (job.keep_ms or -1) + 1, job.keep_until_at, error_size, #previous, #job.waiters) .. error .. previous .. job.waiters
  end
  if job.outcome then
    local outcome = encode_outcome(job.outcome)
    flags, middle = flags + FINISHED, middle .. pack('<I4', #outcome) .. outcome
  end
  if job.terms ~= '' then flags, middle = flags + TERMS, middle .. pack('<I2', #job.terms) .. job.terms end
  if job.job_extension ~= '' or job.work_extension ~= '' then
    local extension = job.job_extension .. job.work_extension
    flags, middle = flags + EXTENDED, middle .. pack('<I4', #extension) .. extension
  end
  local payload = job.has_payload and (job.payload or sub(job.raw, job.payload_at)) or ''
  return pack(HEAD, flags, job.priority, job.generation, job.run_at) .. middle .. payload
end

local function decode_long(job, raw, at)
  local keep_ms, error_size, previous_size, waiters_size
  job.arrival, job.wall_at, job.attempts, job.retries, job.stalls, job.timeouts, keep_ms, job.keep_until_at, error_size,
    previous_size, waiters_size, at = unpack_from(LONG_PART, raw, at)
  if max(job.arrival, job.wall_at, job.keep_until_at, keep_ms) > NEVER then error('garbled') end
  if keep_ms > 0 then job.keep_ms = keep_ms - 1 end
  job.error, at = bytes_at(raw, at, error_size)
  if previous_size > 0 then job.previous = decode_outcome(sub(raw, at, at + previous_size - 1)) end
  at = at + previous_size
  job.waiters = sub(raw, at, at + waiters_size - 1)
  return at + waiters_size
end

-- The fields of a record without LONG, TERMS and EXTENDED, which is most records.
record.DEFAULTS = {__index = {wall_at = 0, attempts = 0, retries = 0, stalls = 0, timeouts = 0, keep_until_at = 0,
  waiters = '', terms = '', job_extension = '', work_extension = ''}}
local DEFAULTS = record.DEFAULTS

local function decode(id, raw, run)
  local flags, priority, generation, run_at, at = unpack_from(HEAD, raw)
  if band(flags, MARK) ~= MARK or priority > 9 or max(generation, run_at) > NEVER then error('garbled') end
  local job = setmetatable({id = id, raw = raw, priority = priority, generation = generation, run_at = run_at,
    arrival = generation, payload_at = at, custom_id = band(flags, CUSTOM_ID) ~= 0,
    has_payload = band(flags, PAYLOAD) ~= 0}, DEFAULTS)
  local outcome, extension
  if band(flags, LONG) ~= 0 then at = decode_long(job, raw, at) end
  if band(flags, FINISHED) ~= 0 then
    outcome, at = sized_at('<I4', raw, at)
    job.outcome = decode_outcome(outcome)
    if job.outcome.started_at > 0 then job.attempts = job.attempts + 1 end
  end
  if band(flags, TERMS) ~= 0 then job.terms, at = sized_at('<I2', raw, at) end
  if band(flags, EXTENDED) ~= 0 then
    extension, at = sized_at('<I4', raw, at)
    job.job_extension, job.work_extension = split_extension(extension)
  end
  if at > #raw + 1 then error('garbled') end
  job.payload_at = at
  if run then
    job.run = decode_run(run)
    job.attempts = job.attempts + 1
  end
  return job
end

record.encode, record.decode, record.encode_run, record.decode_run = encode, decode, encode_run, decode_run
record.encode_outcome, record.sized_at, record.split_extension = encode_outcome, sized_at, split_extension
