-- The verbs of the keys that a namespace shares: the list of queues, the layout, the workers, notes. A full server runs them too,
-- so that a worker can start and drain it. A worker has one record for the whole namespace, on the wall clock.

local ANNOUNCED, EXPIRED_PER_CALL = '<I8I8B', 10 -- beat_at, expires_at, evict_asked, then the facts
local ANNOUNCED_BYTES, MAX_FACTS_BYTES, ZLIB = 17, 2097152, 0x78 -- the first byte of compressed facts
local NOTE, NOTE_BYTES, FORGOTTEN_PER_CALL = '<I8', 8, 250 -- forget_at, then the value
local MAX_NOTE_NAME, MAX_NOTE_BYTES = 250, 16384

function VERBS.list()
  arguments.namespace()
  arguments.queue_name(ARGS[FIRST_ARG])
  return call('SADD', QUEUE .. ':queues', ARGS[FIRST_ARG])
end

function VERBS.layout()
  arguments.namespace()
  if tonumber(ARGS[FIRST_ARG]) ~= LAYOUT then arguments.refuse('the layout of this library is ' .. LAYOUT) end
  call('SET', QUEUE .. ':layout', ARGS[FIRST_ARG], 'NX')
  return call('GET', QUEUE .. ':layout')
end

function VERBS.announce()
  arguments.count(3)
  arguments.namespace()
  local worker, facts, ttl_ms = unpack(ARGS, FIRST_ARG)
  worker, ttl_ms = arguments.worker(worker), arguments.lease(ttl_ms)
  local ok, map = pcall(cmsgpack.unpack, facts)
  if #facts > MAX_FACTS_BYTES or (byte(facts) ~= ZLIB and (not ok or type(map) ~= 'table')) then
    arguments.refuse('facts must be a msgpack map, or a compressed one, of at most ' .. MAX_FACTS_BYTES .. ' bytes')
  end
  for _, expired in ipairs(call('ZRANGEBYSCORE', QUEUE .. ':beats', '-inf', WALL, 'LIMIT', 0, EXPIRED_PER_CALL)) do
    call('ZREM', QUEUE .. ':beats', expired)
    call('HDEL', QUEUE .. ':workers', expired)
  end
  local known, evict = call('HGET', QUEUE .. ':workers', worker), 0
  if known and #known >= ANNOUNCED_BYTES then
    local _, expires_at, asked = unpack_from(ANNOUNCED, known)
    if expires_at > WALL then evict = asked end
  end
  local expires_at = WALL + 1000 * ttl_ms
  call('HSET', QUEUE .. ':workers', worker, pack(ANNOUNCED, WALL, expires_at, evict) .. facts)
  call('ZADD', QUEUE .. ':beats', expires_at, worker)
  return evict
end

function VERBS.evict()
  local worker = ARGS[FIRST_ARG]
  local known = call('HGET', QUEUE .. ':workers', worker)
  if not known or #known < ANNOUNCED_BYTES then return 0 end
  local beat_at, expires_at, _, facts_at = unpack_from(ANNOUNCED, known)
  if expires_at <= WALL then return 0 end
  call('HSET', QUEUE .. ':workers', worker, pack(ANNOUNCED, beat_at, expires_at, 1) .. sub(known, facts_at))
  return 1
end

function VERBS.write_notes()
  arguments.namespace()
  local notes, noted = QUEUE .. ':notes', QUEUE .. ':noted'
  local ttl_ms = arguments.number('a length in ms', ARGS[FIRST_ARG], 1, arguments.MAX_MS)
  for at = FIRST_ARG + 1, #ARGS, 2 do
    local name, value = ARGS[at], ARGS[at + 1]
    if name == '' or #name > MAX_NOTE_NAME or not value or #value > MAX_NOTE_BYTES then
      arguments.refuse('a note has a name of 1 to 250 bytes and a value of at most 16384')
    end
  end
  for _, forgotten in ipairs(call('ZRANGEBYSCORE', noted, '-inf', WALL, 'LIMIT', 0, FORGOTTEN_PER_CALL)) do
    call('ZREM', noted, forgotten)
    call('HDEL', notes, forgotten)
  end
  local forget_at = WALL + 1000 * ttl_ms
  for at = FIRST_ARG + 1, #ARGS, 2 do
    call('HSET', notes, ARGS[at], pack(NOTE, forget_at) .. ARGS[at + 1])
    call('ZADD', noted, forget_at, ARGS[at])
  end
  return 1
end

function VERBS.read_notes()
  local found = call('HMGET', QUEUE .. ':notes', unpack(ARGS, FIRST_ARG))
  for index, note in ipairs(found) do
    found[index] = note and #note >= NOTE_BYTES and unpack_from(NOTE, note) > WALL and sub(note, NOTE_BYTES + 1)
  end
  return found
end

function VERBS.workers()
  return {WALL, call('HGETALL', QUEUE .. ':workers')}
end
