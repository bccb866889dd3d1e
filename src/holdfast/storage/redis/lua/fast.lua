-- Optimised paths. Most jobs are new, run once and end. For them these functions write the bytes that lifecycle.lua and
-- transaction.lua would write, without decoding records. With FAST off, everything takes the general path. The agreement
-- run (tests/storage/test_agreement.py) compares the bytes of all keys of both.

local FAST = true

local stamp, append, list_of = clock.stamp, transaction.append, transaction.list_of
local listened_to, record_event, REMOVED = transaction.listened_to, transaction.record_event, transaction.REMOVED
local completed, encode_outcome = lifecycle.completed, record.encode_outcome

-- The last byte of some fields, and the least size of a record without and with LONG.
local GENERATION_END, RETRIES_END, FENCE_END = RUN_AT_AT - 1, STALLS_AT - 1, LEASE_MS_AT - 1
local HEAD_BYTES, LONG_BYTES = ARRIVAL_AT - 1, LONG_END - 1
-- Where the outcome of a short record has its state and its forget time.
local OUTCOME_AT, FORGOTTEN_AT, FORGOTTEN_END = 23, 48, 55
-- Where a packed outcome has its generation and the end of its run, which follow each other.
local ENDED_GENERATION_AT, ENDED_AT = 2, 18
-- Where the head of a settlement has its fence and its two lengths.
local SETTLED_FENCE_AT, SETTLED_FENCE_END, LENGTHS_AT, LENGTHS_END = 2, 9, 10, 25
-- A number up to NEVER has 0 as its highest byte, and less than this as the next one.
local NEVER_BYTE = 32

-- By the flags of a record, all without an extension. LIVE: without an outcome. PLAIN: without counts, error and waiters too.
-- SHORT: with an outcome, and without counts, error and waiters.
local PLAIN, LIVE, SHORT = {}, {}, {}
for flags = MARK, MARK + LONG + CUSTOM_ID + PAYLOAD + FINISHED + TERMS do
  LIVE[flags] = flags % (2 * FINISHED) < FINISHED
  PLAIN[flags] = LIVE[flags] and flags % 2 ~= LONG
  SHORT[flags] = not LIVE[flags] and flags % 2 ~= LONG
end

-- The flags of a completed record, by those of a plain record without TERMS.
local COMPLETED_FLAGS = {}
for flags = MARK, MARK + FINISHED - 1 do
  COMPLETED_FLAGS[flags] = PLAIN[flags] and MARK + FINISHED + (flags % (2 * CUSTOM_ID) >= CUSTOM_ID and CUSTOM_ID or 0)
end

local NO_RETRIES = '\0\0\0\0'
local NO_TTLS = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'

-- Whether `start_plain` can start such a request, if its id has no record.
function fast.starts(when, has_payload, extended)
  return FAST and when == NOW and has_payload and not extended
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
  append(list_of(writes.zadd, WAITING_INDEXES[priority]), tx.now,
    sub(raw, GENERATION_AT, GENERATION_END) .. id)
  if band(meta[PRIORITIES], PRIORITY_BITS[priority]) == 0 then
    meta[PRIORITIES] = meta[PRIORITIES] + PRIORITY_BITS[priority]
  end
  record_event(tx, KIND.ENQUEUED, id, at, tx.now, '')
  return at
end

-- Whether a claim can lease a waiting job without decoding its record. The member of the index must fit the record, and
-- the job must not be counted as retrying and must not follow the wall clock.
function fast.is_plain(raw, run, index, member)
  if not FAST or not raw or run then return false end
  local flags, priority = byte(raw, FLAGS_AT, PRIORITY_AT)
  if not LIVE[flags] or WAITING_INDEXES[priority] ~= index then return false end
  if PLAIN[flags] then return sub(raw, GENERATION_AT, GENERATION_END) == sub(member, 1, ARRIVAL_BYTES) end
  if #raw < LONG_BYTES or sub(raw, RETRIES_AT, RETRIES_END) ~= NO_RETRIES then return false end
  local arrival, wall_at = unpack_from('<I8I8', raw, ARRIVAL_AT)
  return wall_at == 0 and pack('>I8', arrival) == sub(member, 1, ARRIVAL_BYTES)
end

-- Claim a job that `is_plain`.
function fast.claim_plain(tx, id, raw, index, member, worker, lease_ms)
  local writes, fence, until_at = tx.writes, stamp(tx.time), tx.now + 1000 * lease_ms
  append(list_of(writes, 'runs'), id, pack(LEASE, 0, fence, lease_ms, until_at, #worker) .. worker)
  append(list_of(writes.zadd, ':running'), until_at, id)
  append(list_of(writes.zrem, index), member)
  local generation, run_at = 0, 0
  if listened_to(tx) then generation, run_at = unpack_from('>I8I8', raw, GENERATION_AT) end
  record_event(tx, KIND.CLAIMED, id, generation, run_at, '')
  return fence
end

-- Whether the holder of the lease completes a live record without a `next`.
function fast.completes(raw, run, head, holder)
  return FAST and raw and run and run ~= '' and byte(head) == COMPLETE and LIVE[byte(raw)] and band(byte(run), NEXT) == 0
    and sub(head, SETTLED_FENCE_AT, SETTLED_FENCE_END) == sub(run, FENCE_AT, FENCE_END)
    and sub(run, HOLDER_AT, HOLDER_AT - 1 + #holder) == holder
end

-- Whether a completion deletes the record.
function fast.leaves_nothing(raw, head)
  return PLAIN[byte(raw)] and sub(head, LENGTHS_AT, LENGTHS_END) == NO_TTLS
end

-- Complete a plain job and delete its record.
function fast.complete_plain(tx, id, raw)
  local writes = tx.writes
  append(list_of(writes, 'removed'), id)
  append(list_of(writes, 'ended'), id)
  append(list_of(writes.zrem, ':running'), id)
  tx.entries[id] = REMOVED
  record_event(tx, KIND.COMPLETED, id, listened_to(tx) and unpack_from('>I8', raw, GENERATION_AT) or 0, 0, '')
end

-- Whether a sweep can delete a record without decoding it: a finished one without LONG, which has no waiter.
function fast.forgets(raw, run, state, now)
  return FAST and raw and not run and SHORT[byte(raw)] and #raw > FORGOTTEN_END
    and byte(raw, OUTCOME_AT) == state and (state == BRIEF or unpack_from('<I8', raw, FORGOTTEN_AT) <= now)
end

-- Delete a record that `forgets`.
function fast.forget_short(tx, id, index)
  local writes = tx.writes
  append(list_of(writes, 'removed'), id)
  append(list_of(writes.zrem, index), id)
  tx.entries[id] = {id = id}
  record_event(tx, KIND.FORGOTTEN, id, 0, 0, '')
end

-- Note what the brief outcomes of a call have in common, if their settlements have the same head behind the fence.
local function note_form(tx, head, outcome, packed)
  local writes = tx.writes
  tx.brief = {head = sub(head, LENGTHS_AT), codec = outcome.codec, score = string.format('%.0f', outcome.forget_at),
    before = pack('<I4', #packed) .. sub(packed, 1, ENDED_GENERATION_AT - 1), after = sub(packed, ENDED_AT),
    jobs = list_of(writes, 'jobs'), ended = list_of(writes, 'ended'), left = list_of(writes.zrem, ':running'),
    entered = list_of(writes.zadd, INDEXES[BRIEF])}
end

-- Complete a plain job like the last job of this call that `note_form` has seen. Returns false, without an effect, if there
-- is none, or if the settlement or the record is of another form.
function fast.complete_alike(tx, id, raw, head, codec)
  local form, flags, priority, generation_1, generation_2 = tx.brief, byte(raw, FLAGS_AT, GENERATION_AT + 1)
  local completed_flags = COMPLETED_FLAGS[flags]
  if not form or not completed_flags or #raw < HEAD_BYTES or codec ~= form.codec or sub(head, LENGTHS_AT) ~= form.head then
    return false
  end
  local run_at_1, run_at_2 = byte(raw, RUN_AT_AT, RUN_AT_AT + 1)
  local fence_2, fence_1 = byte(head, SETTLED_FENCE_END - 1, SETTLED_FENCE_END)
  if priority > 9 or generation_1 + run_at_1 + fence_1 > 0 or max(generation_2, run_at_2, fence_2) >= NEVER_BYTE then
    return false
  end
  local jobs, ended, left, entered = form.jobs, form.ended, form.left, form.entered
  local size = #jobs
  jobs[size + 1], jobs[size + 2] = id, string.char(completed_flags) .. sub(raw, PRIORITY_AT, HEAD_BYTES) .. form.before
    .. string.reverse(sub(raw, GENERATION_AT, GENERATION_END)) .. sub(head, SETTLED_FENCE_AT, SETTLED_FENCE_END) .. form.after
  size = #entered
  entered[size + 1], entered[size + 2] = form.score, id
  ended[#ended + 1], left[#left + 1] = id, id
  tx.entries[id] = REMOVED
  local generation, run_at = 0, 0
  if listened_to(tx) then generation, run_at = unpack_from('>I8I8', raw, GENERATION_AT) end
  record_event(tx, KIND.COMPLETED, id, generation, run_at, '')
  return true
end

-- Complete a job, with or without waiters, and keep its outcome. Returns false, without an effect, for other records.
function fast.complete_remembered(tx, id, raw, head, settlement, worker)
  local flags, priority = byte(raw, FLAGS_AT, PRIORITY_AT)
  if #raw < (flags % 2 == LONG and LONG_BYTES or HEAD_BYTES) or priority > 9 then return false end
  local _, _, generation, run_at, at = unpack_from(HEAD, raw)
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
  local run = {fence = settlement.fence, worker = worker}
  local outcome = completed({generation = generation, keep_until_at = keep_until_at, run = run}, settlement, tx.now)
  if outcome.forget_at <= tx.now then return false end
  local writes, packed = tx.writes, encode_outcome(outcome)
  local middle = ''
  if flags % 2 == LONG then
    middle = pack(LONG_PART, arrival, wall_at, attempts, 0, stalls, timeouts, 0, keep_until_at, 0, 0, #waiters) .. waiters
  end
  flags = MARK + FINISHED + band(flags, LONG + CUSTOM_ID + TERMS)
  append(list_of(writes, 'jobs'), id, pack(HEAD, flags, priority, generation, run_at) .. middle
    .. pack('<I4', #packed) .. packed .. terms)
  append(list_of(writes, 'ended'), id)
  append(list_of(writes.zrem, ':running'), id)
  append(list_of(writes.zadd, INDEXES[outcome.state]), outcome.forget_at, id)
  tx.meta[FORGET_AT] = min(tx.meta[FORGET_AT], outcome.forget_at)
  if outcome.state == BRIEF then tx.meta[HAS_BRIEF] = 1 end
  tx.entries[id] = REMOVED
  record_event(tx, KIND.COMPLETED, id, generation, run_at, waiters, outcome)
  if outcome.state == BRIEF and not outcome.result then note_form(tx, head, outcome, packed) end
  return true
end
