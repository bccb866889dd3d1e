-- Optimised paths. Most jobs are new, run once and end. For them these functions write the bytes that lifecycle.lua and
-- transaction.lua would write, without decoding records. With FAST off, everything takes the general path. The agreement
-- run (tests/storage/test_agreement.py) compares the bytes of all keys of both.

local FAST = true

local stamp, append, list_of = clock.stamp, transaction.append, transaction.list_of
local listened_to, record_event, REMOVED = transaction.listened_to, transaction.record_event, transaction.REMOVED
local HEAD, LONG_PART, fence_of, held_by, generation_bytes = record.HEAD, record.LONG_PART, record.fence_of, record.held_by,
  record.generation_bytes

-- By the flags of a record. LIVE: without an outcome and an extension. PLAIN: without counts, error and waiters too.
local PLAIN, LIVE = {}, {}
for flags = MARK, MARK + LONG + CUSTOM_ID + PAYLOAD + FINISHED + TERMS do
  LIVE[flags] = flags % (2 * FINISHED) < FINISHED
  PLAIN[flags] = LIVE[flags] and flags % 2 ~= LONG
end

-- Where the head of a settlement has its fence and its two lengths.
local FENCE_AT, LENGTHS_AT, LENGTHS_END = 2, 10, 25
local NO_TTLS = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'

-- Is the request one of those that `start_plain` can start, if its id has no record?
function fast.starts(request)
  return FAST and request.when == NOW and request.payload and request.work_extension == ''
end

-- Write the record of a new id that is due at once.
function fast.start_plain(tx, request)
  local meta, writes, id, terms, flags, middle = tx.meta, tx.writes, request.id, request.terms, MARK + PAYLOAD, ''
  local at, priority = stamp(meta), request.priority
  if request.custom_id then flags = flags + CUSTOM_ID end
  if request.keep_ms > 0 then
    flags = flags + LONG
    middle = pack(LONG_PART, at, 0, 0, 0, 0, 0, 0, tx.now + 1000 * request.keep_ms, 0, 0, #CLIENT) .. CLIENT
  end
  if terms ~= '' then
    flags = flags + TERMS
    middle = middle .. pack('<I2', #terms) .. terms
  end
  local raw = pack(HEAD, flags, priority, at, tx.now) .. middle .. request.payload
  append(list_of(writes, 'jobs'), id, raw)
  append(list_of(writes.zadd, WAITING_INDEXES[priority]), tx.now, generation_bytes(raw) .. id)
  if band(meta[PRIORITIES], PRIORITY_BITS[priority]) == 0 then
    meta[PRIORITIES] = meta[PRIORITIES] + PRIORITY_BITS[priority]
  end
  record_event(tx, KIND.ENQUEUED, id, at, tx.now, '')
  return at
end

-- Can a waiting job be claimed without decoding its record? The member of the index must be the record's, and the job must
-- not be one that is counted as retrying or that follows the clock.
function fast.is_plain(raw, run, index, member)
  if not FAST or not raw or run then return false end
  local flags = record.flags_of(raw)
  if not LIVE[flags] or WAITING_INDEXES[record.priority_of(raw)] ~= index then return false end
  if PLAIN[flags] then return generation_bytes(raw) == sub(member, 1, ARRIVAL_BYTES) end
  if not record.is_unretried(raw) then return false end
  local arrival, wall_at = record.arrival_and_wall_at(raw)
  return wall_at == 0 and pack('>I8', arrival) == sub(member, 1, ARRIVAL_BYTES)
end

-- Claim a job that `is_plain`.
function fast.claim_plain(tx, id, raw, index, member, worker, lease_ms)
  local writes, fence, until_at = tx.writes, stamp(tx.time), tx.now + 1000 * lease_ms
  append(list_of(writes, 'runs'), id, record.new_lease(fence, lease_ms, until_at, worker))
  append(list_of(writes.zadd, ':running'), until_at, id)
  append(list_of(writes.zrem, index), member)
  local generation, run_at = 0, 0
  if listened_to(tx) then generation, run_at = record.generation_and_run_at(raw) end
  record_event(tx, KIND.CLAIMED, id, generation, run_at, '')
  return fence
end

-- Is this a completion by the holder of the lease, of a live record without a `next`?
function fast.completes(raw, run, head, holder)
  return FAST and raw and run and byte(head) == COMPLETE and LIVE[record.flags_of(raw)] and band(byte(run), NEXT) == 0
    and sub(head, FENCE_AT, LENGTHS_AT - 1) == fence_of(run) and held_by(run, holder)
end

-- Does a completion leave nothing of its record?
function fast.leaves_nothing(raw, head)
  return PLAIN[record.flags_of(raw)] and sub(head, LENGTHS_AT, LENGTHS_END) == NO_TTLS
end

-- Complete a plain job that leaves nothing.
function fast.complete_plain(tx, id, raw)
  local writes = tx.writes
  append(list_of(writes, 'removed'), id)
  append(list_of(writes, 'ended'), id)
  append(list_of(writes.zrem, ':running'), id)
  tx.entries[id] = REMOVED
  record_event(tx, KIND.COMPLETED, id, listened_to(tx) and record.generation_of(raw) or 0, 0, '')
end

-- Complete a job that leaves an outcome, and may have waiters. Returns false, without an effect, for every other record.
function fast.complete_remembered(tx, id, raw, settlement)
  local flags = record.flags_of(raw)
  if record.is_cut(raw) or record.priority_of(raw) > 9 then return false end
  local _, priority, generation, run_at, at = unpack_from(HEAD, raw)
  local arrival, wall_at, attempts, retries, stalls, timeouts, keep_until_at, waiters = generation, 0, 0, 0, 0, 0, 0, ''
  if flags % 2 == LONG then
    local keep_ms, error_size, previous_size, waiters_size
    arrival, wall_at, attempts, retries, stalls, timeouts, keep_ms, keep_until_at, error_size, previous_size, waiters_size,
      at = unpack_from(LONG_PART, raw, at)
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
  local outcome = lifecycle.completed({generation = generation, keep_until_at = keep_until_at}, settlement, tx.now)
  if outcome.forget_at <= tx.now then return false end
  local writes, packed = tx.writes, record.encode_outcome(outcome)
  flags = MARK + LONG + FINISHED + band(flags, CUSTOM_ID + TERMS)
  append(list_of(writes, 'jobs'), id, pack(HEAD, flags, priority, generation, run_at)
    .. pack(LONG_PART, arrival, wall_at, attempts + 1, 0, stalls, timeouts, 0, keep_until_at, 0, 0, #waiters) .. waiters
    .. pack('<I4', #packed) .. packed .. terms)
  append(list_of(writes, 'ended'), id)
  append(list_of(writes.zrem, ':running'), id)
  append(list_of(writes.zadd, ':completed'), outcome.forget_at, id)
  tx.meta[FORGET_AT] = min(tx.meta[FORGET_AT], outcome.forget_at)
  tx.entries[id] = REMOVED
  record_event(tx, KIND.COMPLETED, id, generation, run_at, waiters, outcome)
  return true
end
