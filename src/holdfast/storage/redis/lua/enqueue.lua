-- The verb `enqueue`, in a separate file because an enqueue in a caller's MULTI needs no other verb. Mirrors
-- storage/local/engine.py.

local REQUEST, ENQUEUED = '<BBBBBBBBI8I8', '<BBI8'
local REQUEST_ARGS, REQUEST_BYTES = 4, 24 -- id, head, terms, payload
-- In a reply: the position of the cached outcomes, and of the outcome in one of these: the number of the request, the
-- outcome, the id, the generation.
local CACHED_OUTCOMES, CACHED_OUTCOME = 3, 2

local start_plain, refuse, check_terms = fast.start_plain, arguments.refuse, arguments.terms

-- The requests of heads without a time, by head. Most calls have one of these few, so they are kept for later calls.
local TIMELESS = {}

local function read_request(head)
  if #head ~= REQUEST_BYTES then refuse('the head of a request must have ' .. REQUEST_BYTES .. ' bytes') end
  local priority, has_payload, custom_id, updates, takes_payload, rule, resets_counts, when, at, keep_ms =
    unpack_from(REQUEST, head)
  local extended, flags = has_payload >= EXTENDED, has_payload % EXTENDED
  if priority > 9 or has_payload > EXTENDED + 1 or max(flags, custom_id, updates, takes_payload, resets_counts) > 1
    or rule > IF_EARLIER or when > WALL_TIME then
    refuse('the head of a request has a code that does not exist')
  elseif at > (when == WALL_TIME and arguments.LAST_WALL_AT or arguments.MAX_MS) or keep_ms > arguments.MAX_MS
    or (when == WALL_TIME and at == 0) then
    refuse('the head of a request has a time that is out of range')
  end
  has_payload = flags == 1
  if not has_payload and (updates == 0 or takes_payload == 1) then refuse('a request has no payload') end
  local request = {priority = priority, has_payload = has_payload, custom_id = custom_id == 1, extended = extended,
    starts_fast = fast.starts(when, has_payload, extended), updates = updates == 1, takes_payload = takes_payload == 1,
    rule = rule, resets_counts = resets_counts == 1, when = when, at = at, keep_ms = keep_ms, id = '', terms = '',
    work_extension = '', payload = nil}
  if at == 0 and keep_ms == 0 then TIMELESS[head] = request end
  return request
end

-- Enqueue the requests that `request_at(number)` returns. Fills `replies` and the cached `outcomes`.
function enqueue.all(tx, ids, request_at, replies, outcomes)
  local raws, met, others = call('HMGET', tx.queue .. ':jobs', unpack(ids)), {}, {}
  for at = 1, #ids do
    local id = ids[at]
    met[id] = raws[at] and true or met[id] ~= nil or tx.entries[id] ~= nil
    if met[id] then others[#others + 1] = id end
  end
  if #others > 0 then transaction.load(tx, others) end
  for at = 1, #ids do
    local id, request = ids[at], request_at(at)
    if not met[id] and request.starts_fast then
      replies[at] = pack(ENQUEUED, NEW, 0, start_plain(tx, request))
    else
      local entry = tx.entries[id] or transaction.enter(tx, id)
      local after, placed, generation, state, kind = lifecycle.enqueue(entry.job, request, tx.time)
      transaction.record_change(tx, entry, after, kind)
      replies[at] = pack(ENQUEUED, placed, state, generation)
      if placed >= CACHED then outcomes[#outcomes + 1] = {at, record.encode_outcome(after.outcome), id, generation} end
    end
  end
end

function VERBS.enqueue()
  local ids, heads, replies, outcomes = arguments.ids(FIRST_ARG, REQUEST_ARGS), {}, {}, {}
  local tx = transaction.open(QUEUE)
  transaction.sweep_forgotten(tx, FORGET_PER_ITEM * #ids)
  enqueue.all(tx, ids, function(at)
    local first = FIRST_ARG + REQUEST_ARGS * (at - 1)
    local head = ARGS[first + 1]
    local request = heads[head]
    if not request then
      request = TIMELESS[head] or read_request(head)
      heads[head] = request
    end
    request.id, request.terms = ids[at], ARGS[first + 2]
    request.payload = request.has_payload and ARGS[first + 3] or nil
    if request.extended then -- #terms I2, terms, extension
      local ok, own, extension_at = pcall(record.sized_at, '<I2', request.terms, 1)
      if not ok then refuse('the terms are cut off') end
      request.work_extension = arguments.extension(sub(request.terms, extension_at))
      request.terms = own
    end
    if request.terms ~= '' then check_terms(request.terms) end
    return request
  end, replies, outcomes)
  transaction.close(tx)
  for _, request in pairs(heads) do request.payload = nil end
  return {tx.opened, table.concat(replies), outcomes}
end

function KEPT_AS.enqueue(reply)
  local opened, packed, outcomes = unpack(reply)
  if #outcomes == 0 then return reply end
  local kept = {}
  for at, cached in ipairs(outcomes) do
    local number, outcome, id, generation = unpack(cached)
    kept[at] = {number, #outcome > MAX_INLINE_BYTES and '' or outcome, id, generation}
  end
  return {opened, packed, kept}
end

-- A large outcome is not kept with the reply. It is read again, if the record still has it.
function REPEATS.enqueue(reply)
  for _, cached in ipairs(reply[CACHED_OUTCOMES]) do
    local _, packed, id, generation = unpack(cached)
    if packed == '' then
      local ok, job = pcall(record.decode, id, call('HGET', QUEUE .. ':jobs', id))
      for _, outcome in pairs(ok and {job.previous, job.outcome} or {}) do
        if outcome.generation == generation then cached[CACHED_OUTCOME] = record.encode_outcome(outcome) end
      end
    end
  end
  return reply
end
