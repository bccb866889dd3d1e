-- The verbs that only read. Clients decode the records and decide what they mean; a reply has the queue's time for that.

local ENTRY_FIELDS = 5 -- of `page`: index, member, score, record, lease

-- The time and the skew of a queue, and its metadata if there is such a queue. The last two results say whether the time
-- needs a note, and when the metadata was written.
local function time_of(queue)
  local meta = metadata.read(queue)
  if not meta then return WALL, 0 end
  local noted_at, noted_skew = meta[LAST_AT], meta[SKEW]
  clock.tick(meta)
  return meta[LAST_AT], meta[SKEW], meta, clock.needs_note(meta, noted_at, noted_skew), noted_at
end

-- One character per queue: 1 if it has a job that is due, a lease to take back, or (if asked) a record to forget. A queue whose
-- metadata cannot be read is 1 as well: the claim of that queue then returns the error, and other queues are not affected.
function VERBS.ready()
  local replies, forgotten = {}, ARGS[FIRST_ARG] == '1'
  for at = FIRST_ARG + 1, #ARGS do
    local ok, now, _, meta, needs_note = pcall(time_of, ARGS[at])
    local tx = {queue = ARGS[at], meta = meta}
    local run_at = meta and meta[PAUSED] == 0 and leases.next_run_at(tx)
    local sweep_at = meta and leases.next_sweep_at(tx)
    local is_ready = not ok or (run_at and run_at <= now) or (sweep_at and sweep_at <= now)
      or (forgotten and meta and meta[FORGET_AT] <= now)
    if needs_note and not is_ready and call('EXISTS', ARGS[at] .. ':jobs') == 1 then metadata.write(ARGS[at], meta) end
    replies[#replies + 1] = is_ready and '1' or '0'
  end
  return table.concat(replies)
end

function VERBS.get()
  local ids = arguments.ids(FIRST_ARG, 1)
  local now, skew = time_of(QUEUE)
  local raws, runs = transaction.records(QUEUE, ids)
  return {now, skew, raws, runs}
end

-- Whether one string is behind another in the order of their bytes, which is the order of a server within a score. `>`
-- follows the locale of the server instead.
local function is_behind(one, other)
  for at = 1, min(#one, #other) do
    local left, right = byte(one, at), byte(other, at)
    if left ~= right then return left > right end
  end
  return #one > #other
end

-- The rank of the first member behind a place in an index. Many members may have its score, and the member of that place
-- may have been removed.
local function rank_after(key, score, member)
  local low, high = call('ZCOUNT', key, '-inf', '(' .. score), call('ZCOUNT', key, '-inf', score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_behind(call('ZRANGE', key, middle, middle)[1], member) then high = middle else low = middle + 1 end
  end
  return low
end

-- Members of indexes with their records, one index after the other, from behind a place in the first index.
function VERBS.page()
  local limit, score, member = unpack(ARGS, FIRST_ARG)
  local found = {}
  local now, skew, meta = time_of(QUEUE)
  for at = FIRST_ARG + 3, #ARGS do
    local index, left, ids = ARGS[at], limit - #found / ENTRY_FIELDS, {}
    local key = QUEUE .. index
    local from = score == '' and 0 or rank_after(key, score, member)
    local members = left > 0 and call('ZRANGE', key, from, from + left - 1, 'WITHSCORES') or {}
    for place = 1, #members, 2 do ids[#ids + 1] = transaction.id_of(index, members[place]) end
    local raws, runs = transaction.records(QUEUE, ids)
    for place = 1, #ids do
      local last = #found
      found[last + 1], found[last + 2], found[last + 3] = index, members[2 * place - 1], members[2 * place]
      found[last + 4], found[last + 5] = raws[place], runs[place]
    end
    score = ''
  end
  return {now, skew, meta and meta[LAST_STAMP] or 0, found}
end

-- The metadata and the sizes of the indexes, for a snapshot and for the audit. The positions of the reply are the fields of
-- StatsReply in codec.py.
function VERBS.stats()
  local now, _, meta, _, written_at = time_of(QUEUE)
  if not meta then return false end
  local ready, scheduled, oldest = 0, 0, now
  for priority = 0, 9 do
    local key = QUEUE .. WAITING_INDEXES[priority]
    local due_here = call('ZCOUNT', key, '-inf', now)
    ready, scheduled = ready + due_here, scheduled + call('ZCARD', key) - due_here
    if due_here > 0 then
      local head = call('ZRANGE', key, 0, 0, 'WITHSCORES')
      local id = transaction.id_of(WAITING_INDEXES[priority], head[1])
      local ok, job = pcall(record.decode, id, call('HGET', QUEUE .. ':jobs', id))
      oldest = min(oldest, ok and max(job.run_at, job.generation) or now)
    end
  end
  local sizes, past = {}, {}
  for state = RUNNING, BRIEF do
    local key = QUEUE .. INDEXES[state]
    sizes[#sizes + 1], past[#past + 1] = call('ZCARD', key), call('ZCOUNT', key, '-inf', now)
  end
  local totals = {}
  for kind = 1, KINDS do totals[kind] = meta[TOTALS + kind] end
  return {now, ready, scheduled, oldest, sizes, past, meta[RETRYING], meta[DEFERRED_JOBS], meta[PAUSED],
    meta[REASON], totals, call('HLEN', QUEUE .. ':jobs'), call('HLEN', QUEUE .. ':runs'),
    meta[LAST_STAMP], written_at}
end
