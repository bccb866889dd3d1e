-- Numbered calls, and `run`, the entry point of every call of the library.

local NUMBER_ARG = 3 -- behind the verb and the client
local KEY_SUFFIX = ':meta'
local NUMBER = '<I8'
local WRITES = {'SET', 'HSET', 'HDEL', 'ZADD', 'ZREM'}

-- Refuse a user who lacks a command that writes: without this check the step could end in its middle.
local function check_permissions()
  for _, command in ipairs(WRITES) do
    if not redis.acl_check_cmd(command, QUEUE .. KEY_SUFFIX, '0', '0') then
      error({err = 'NOPERM this user has no permission for ' .. command .. ' inside the function'})
    end
  end
end

-- A call that changes something has a number. The same number again gets the same reply, a lower number is refused, and
-- neither changes anything: a reply may be lost, and the first copy of a call may arrive after the second.
local function once(verb, number)
  local key = QUEUE .. ':call:' .. CLIENT .. ':' .. verb
  local kept = call('GET', key)
  if kept then
    local last, at = unpack_from(NUMBER, kept)
    if number < last then return {err = 'HOLDFAST_SUPERSEDED'} end
    if number == last then
      local reply = cmsgpack.unpack(sub(kept, at))
      return REPEATS[verb] and REPEATS[verb](reply) or reply
    end
  else
    check_permissions() -- Once per client and verb, or every ten minutes.
  end
  local reply = VERBS[verb]()
  local keeps = KEPT_AS[verb] and KEPT_AS[verb](reply) or reply
  call('SET', key, pack(NUMBER, number) .. cmsgpack.pack(keeps), 'PX', CALL_KEPT_MS)
  return reply
end

function calls.run(keys, args)
  if not call then
    call, pack, unpack_from, band, sub = redis.call, struct.pack, struct.unpack, bit.band, string.sub
    byte, max, min = string.byte, math.max, math.min
  end
  ARGS, QUEUE = args, sub(keys[1], 1, -#KEY_SUFFIX - 1)
  local verb, sender, number = unpack(args, 1, NUMBER_ARG)
  if not VERBS[verb] or not sender or #sender < WAITER_BYTES or not number or sub(keys[1], #QUEUE + 1) ~= KEY_SUFFIX then
    arguments.refuse('a call has a key that ends in :meta, a verb, a client of 12 characters and a number')
  end
  CLIENT, DATABASE = sender, ''
  if #sender > WAITER_BYTES then
    CLIENT, DATABASE = sub(sender, 1, WAITER_BYTES), sub(sender, WAITER_BYTES + 1)
    if not string.find(DATABASE, '^@[0-9]+$') then arguments.refuse('only @ and a number follow a client') end
  end
  SINGLE_NODE = #keys == 1 -- in a cluster, a call names all keys
  WALL = clock.wall_clock()
  if number == '' then return VERBS[verb]() end
  return once(verb, arguments.number('the number of a call', number, 1, NEVER))
end
