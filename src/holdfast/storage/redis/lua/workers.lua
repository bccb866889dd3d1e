-- The verbs of the keys that a namespace shares: the list of queues, the layout, the workers. A full server runs them too,
-- so that a worker can start and drain it. A worker has one record for the whole namespace, on the wall clock.

local ANNOUNCED, EXPIRED_PER_CALL = '<I8I8B', 10 -- beat_at, expires_at, evict_asked, then the facts
local ANNOUNCED_BYTES = 17

function VERBS.list()
  return call('SADD', QUEUE .. ':queues', ARGS[FIRST_ARG])
end

function VERBS.layout()
  call('SET', QUEUE .. ':layout', ARGS[FIRST_ARG], 'NX')
  return call('GET', QUEUE .. ':layout')
end

function VERBS.announce()
  local worker, facts, ttl_ms = unpack(ARGS, FIRST_ARG)
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

function VERBS.workers()
  return {WALL, call('HGETALL', QUEUE .. ':workers')}
end
