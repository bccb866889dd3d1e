-- Checks of arguments: a call that would store what no client can read is refused before anything is changed. Mirrors
-- storage/validation.py.

local MAX_ITEMS, MAX_ID_BYTES, FOLLOW_UP_ID_BYTES, MAX_WORKER_BYTES = 250, 512, 32, 800
local MAX_CODEC_BYTES, MAX_EXTENSION_BYTES, MAX_LIMIT = 40, 65536, 1000000
local FAILED_SUFFIX, NAME, NAMESPACE = '/failed', '^[A-Za-z0-9_.-]+$', '^{[A-Za-z0-9_.-]+}$'
local MAX_NAME, MAX_NAMESPACE = 120, 40
arguments.MAX_MS, arguments.LAST_WALL_AT = 315360000000, 4102444799999999 -- ten years; the end of 2099
local MAX_MS = arguments.MAX_MS
local MAX_KNOWN, MAX_KNOWN_BYTES = 500, 200

local function refuse(problem)
  error({err = 'HOLDFAST_ARGUMENTS ' .. problem})
end

-- A check that remembers texts which have passed it, over calls: most calls repeat the texts of those before them.
local function remembers(is_valid, problem)
  local known, count = {}, 0
  return function(text)
    if known[text] then return text end
    if not is_valid(text) then refuse(problem) end
    if #text <= MAX_KNOWN_BYTES then
      if count == MAX_KNOWN then known, count = {}, 0 end
      known[text], count = true, count + 1
    end
    return text
  end
end

-- Refuse a call with another number of arguments behind the number of the call.
function arguments.count(expected)
  if #ARGS - FIRST_ARG + 1 ~= expected then refuse('this verb takes ' .. expected .. ' arguments') end
end

local function is_whole(number, least, most)
  return number and number >= least and number <= most and number % 1 == 0
end

function arguments.number(name, text, least, most)
  local number = tonumber(text)
  if not is_whole(number, least, most) then
    refuse(string.format('%s must be a whole number from %.0f to %.0f', name, least, most))
  end
  return number
end

-- Bytes that may follow a first byte in UTF-8, where not all from 128 to 191 may.
local SECOND = {[224] = {160, 191}, [237] = {128, 159}, [240] = {144, 191}, [244] = {128, 143}}

local function is_utf8(text)
  if not string.find(text, '[\128-\255]') then return true end
  local at = 1
  while at <= #text do
    local first = byte(text, at)
    local size = first < 128 and 1 or first >= 194 and first < 224 and 2 or first >= 224 and first < 240 and 3
      or first >= 240 and first < 245 and 4
    if not size then return false end
    for offset = 1, size - 1 do
      local range, follows = offset == 1 and SECOND[first] or {128, 191}, byte(text, at + offset)
      if not follows or follows < range[1] or follows > range[2] then return false end
    end
    at = at + size
  end
  return true
end

local function is_text(text, most)
  return text and #text > 0 and #text <= most and is_utf8(text)
end

arguments.worker = remembers(function(name)
  return is_text(name, MAX_WORKER_BYTES) and not string.find(name, '[%z\1-\31\127]')
end, 'a worker name must have 1 to 200 printable characters')

function arguments.lease(text)
  return arguments.number('a lease in ms', text, 100, 86400000)
end

-- The ids of the items: every `step`-th argument, from `first` on.
function arguments.ids(first, step)
  local args, ids, longest = ARGS, {}, MAX_ID_BYTES
  if sub(QUEUE, -#FAILED_SUFFIX) == FAILED_SUFFIX then longest = longest + FOLLOW_UP_ID_BYTES end
  for at = first, #ARGS, step do
    local id = args[at]
    if id == '' or #id > longest then refuse('an id must have 1 to ' .. longest .. ' bytes') end
    ids[#ids + 1] = id
  end
  if #ids == 0 or #ids > MAX_ITEMS or #ARGS ~= first + step * #ids - 1 then
    refuse('this verb takes 1 to ' .. MAX_ITEMS .. ' items of ' .. step .. ' arguments')
  end
  return ids
end

-- Refuse the key of a queue whose name is not valid. Only a call that creates a queue needs this check.
function arguments.queue(queue)
  local namespace, name, rest = string.match(queue, '^{([^/]*)/([^/}]*)}(.*)$')
  if not namespace or not string.find(namespace, NAME) or not string.find(name, NAME) or #namespace > MAX_NAMESPACE
    or #name > MAX_NAME or (rest ~= '' and rest ~= FAILED_SUFFIX) then
    refuse('the key must be {NAMESPACE/QUEUE}:meta or {NAMESPACE/QUEUE}/failed:meta')
  end
end

function arguments.namespace()
  if not string.find(QUEUE, NAMESPACE) or #QUEUE > MAX_NAMESPACE + 2 then refuse('the key must be {NAMESPACE}:meta') end
end

function arguments.queue_name(name)
  local base = string.gsub(name or '', FAILED_SUFFIX .. '$', '')
  if not string.find(base, NAME) or #base > MAX_NAME then refuse('the name of a queue is not valid') end
  return name
end

arguments.codec = remembers(function(name)
  return is_text(name, MAX_CODEC_BYTES)
end, 'a codec must have a name of 1 to 40 bytes')

-- The formats of whole numbers in msgpack, by their first byte.
local WHOLE = {[0xcc] = '>B', [0xcd] = '>I2', [0xce] = '>I4', [0xcf] = '>I8', [0xd0] = '>b', [0xd1] = '>i2', [0xd2] = '>i4',
  [0xd3] = '>i8'}
local NIL, ARRAY_OF_SIX, SHORT_TEXT, TEXT = 0xc0, 0x96, 0xa0, 0xd9

local function number_in_terms(packed, at, least, most)
  local first = byte(packed, at)
  if first == NIL then return at + 1 end
  local number, after = first, at + 1
  if first > 127 then number, after = unpack_from(WHOLE[first], packed, at + 1) end
  if not is_whole(number, least, most) then error('out of range') end
  return after
end

-- The options of a work: see `_WorkOptions` in codec.py.
local function read_terms(packed)
  local ttl, at = unpack_from('<I8', packed)
  if not is_whole(ttl, 0, MAX_MS + 1) or byte(packed, at) ~= ARRAY_OF_SIX then error('garbled') end
  local size, text_at = byte(packed, at + 1) - SHORT_TEXT, at + 2
  if byte(packed, at + 1) == TEXT then size, text_at = byte(packed, at + 2), at + 3 end
  if not is_text(sub(packed, text_at, text_at + size - 1), MAX_CODEC_BYTES) then error('garbled') end
  at = number_in_terms(packed, text_at + size, 1, MAX_MS)
  for _ = 1, 3 do at = number_in_terms(packed, at, 0, MAX_LIMIT) end
  if number_in_terms(packed, at, 0, MAX_MS) ~= #packed + 1 then error('garbled') end
end

arguments.terms = remembers(function(packed)
  return #packed < 65536 and pcall(read_terms, packed)
end, 'the terms are not those of a work')

function arguments.extension(packed)
  local ok, job_entries = pcall(record.split_extension, packed)
  if not ok or job_entries ~= '' or packed == '' or #packed > MAX_EXTENSION_BYTES then
    refuse('the extension is not that of a work')
  end
  return packed
end

arguments.refuse, arguments.is_whole = refuse, is_whole
