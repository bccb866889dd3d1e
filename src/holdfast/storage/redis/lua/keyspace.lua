--[[ The life of a job on Redis and Valkey: the keyspace, the stored formats, and the names that all files share.

script.py joins the files of this folder into one library of functions. Every call of the library is one atomic step. The
files mirror Python modules: lifecycle.lua is _core/lifecycle.py, clock.lua is _core/clock.py, transaction.lua is
storage/local/table.py, record.lua is codec.py, and the files with verbs are storage/local/engine.py. storage/base.py
documents the verbs. The files do not read payloads, results and errors.

The locals of this file are visible in all others. Every other file is joined as `do ... end`, so that its locals stay
private (Lua allows 200 in one function), and puts its public functions into the table that has the name of the file.

KEYSPACE. The keys of a queue share the hash tag {namespace/queue}; the companion queue QUEUE/failed has the same tag. A
call names the metadata key. In a cluster it names all other keys that it may touch too, so that the cluster refuses a call
whose slot is being moved.

  {ns/q}:meta       string  counters, clock and pause state of the queue: see META
  {ns/q}:jobs       hash    id -> record
  {ns/q}:runs       hash    id -> the lease of a running job, and what exists only while the job runs
  {ns/q}:w0 .. :w9  zset    waiting jobs, one key per priority: arrival (8 bytes, big-endian) and id, by run_at
  {ns/q}:running    zset    id, by until_at
  {ns/q}:completed  zset    id, by forget_at; likewise :failed and :cancelled
  {ns/q}:brief      zset    the same of completed jobs whose outcome is kept only for its handle, at most MAX_BRIEF
  {ns/q}:wake       list    at most one token: there may be work
  {ns/q}:floor      string  the last stamp of a queue that was dropped; expires
  {ns/q}:call:CLIENT:VERB   string  that client's last number for this verb, and the reply; expires when idle
  {ns/q}:events, :to:CLIENT, :to:*  sharded channels, see `publish` in transaction.lua; in database N, `@N` follows
  {ns}:queues       set     names of queues; in a cluster it is on another node, and the client calls `list`
  {ns}:workers      hash    worker -> what it announced;  {ns}:beats  zset  worker, by the time at which that expires
  {ns}:notes        hash    name -> forget_at (8 bytes) and value;  {ns}:noted  zset  name, by forget_at
  {ns}:layout       string  the layout version

RECORD. Times and stamps are microseconds in 8 bytes. `n + 1` means that 0 stands for none. Numbers are little-endian,
except in the first line: a plain record has the same bytes there as the beginning of its member among the waiting.

  flags B  priority B  generation I8  run_at I8
  [LONG]      arrival I8  wall_at I8  attempts I4 retries I4 stalls I4 timeouts I4  keep_ms+1 I8  keep_until_at I8
              #error+1 I4  #previous I4  #waiters I4   error  previous  waiters
  [FINISHED]  #outcome I4  outcome
  [TERMS]     #terms I2  terms
  [EXTENDED]  #extension I4  extension
  payload

A record without LONG has arrival = generation and 0 in the other fields. `attempts` does not count the present run, nor
the run that ended the job.
OUTCOME   state B  generation I8  started_at I8  ended_at I8  forget_at I8  dedup_at I8  #worker I2  #codec B  #result+1 I4
          #error+1 I4  worker  codec  result  error. Without a run that ended the job, started_at is 0 and worker empty.
TERMS     result_ttl_ms+1 I8, and the other options of the work, which only clients read
RUN       flags B  fence I8  lease_ms I4  until_at I8  #worker I2  worker  [PROGRESS] #progress I4 progress  [NEXT] next
NEXT      generation I8  run_at I8  arrival I8  wall_at I8  takes_payload B  takes_run_at B  resets_counts B  priority B
          #terms I2  terms  [EXTENDED, in takes_payload] #extension I4 extension  payload
EXTENSION entries in the order of their tags: tag B  #value I4  value. Tags below 128 describe the job: they stay with its
          generation. The others describe the work: they travel with the payload. Only clients read values; unknown tags are
          kept. A record or a NEXT without entries has no such section.
META      160 + layout B  last_at I8  last_stamp I8  skew I8  paused B  has_brief B  priorities I2  forget_at I8  retrying i8
          deferred i8  the totals of the fifteen kinds i8 each  #steps B  steps (stamp I8  peak I8)  reason
]]

local LAYOUT, LAYOUT_MARK = 3, 160
local RESULT_TTL_MS, CANCELLED_TTL_MS, FAILURE_TTL_MS, WAITED_MS = 3600000, 60000, 604800000, 10000
local MAX_STALL_DELAY_MS = 300000
local DAMAGED = '{"type":"RecordDamaged","message":"the stored record could not be read","kind":"permanent"}'
local NEVER = 9007199254740991
local SWEEP_ON_CLAIM, FORGET_PER_ITEM, MAX_BRIEF = 10, 2, 100000
local CALL_KEPT_MS, FLOOR_KEPT_MS = 600000, 2592000000
local MAX_WAITERS, WAITER_BYTES, MAX_INLINE_BYTES = 4, 12, 4096

local WAITING, RUNNING, COMPLETED, FAILED, CANCELLED = 1, 2, 3, 4, 5
local BRIEF = 6 -- the state of an outcome that is completed and brief
local INDEXES = {[RUNNING] = ':running', [COMPLETED] = ':completed', [FAILED] = ':failed', [CANCELLED] = ':cancelled',
  [BRIEF] = ':brief'}
local ARRIVAL_BYTES = 8 -- of the arrival before the id, in a member of these:
local WAITING_INDEXES = {[0] = ':w0', ':w1', ':w2', ':w3', ':w4', ':w5', ':w6', ':w7', ':w8', ':w9'}
local PRIORITY_BITS = {[0] = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
local NEW, UPDATED, DEFERRED, DUPLICATE, CACHED = 1, 2, 3, 4, 5 -- what an enqueue did; 0: nothing, 6: CACHED, of a failure
local KEEPS, TAKES, IF_LATER, IF_EARLIER = 0, 1, 2, 3 -- rules for run_at
local NOW, DELAY, WALL_TIME = 0, 1, 2 -- how a request says when
local COMPLETE, FAIL, RETRY, RELEASE = 1, 2, 3, 4 -- settlements
local KIND = {ENQUEUED = 1, UPDATED = 2, DEFERRED = 3, CLAIMED = 4, COMPLETED = 5, FAILED = 6, CANCELLED = 7,
  CANCEL_ASKED = 8, RETRIED = 9, TIMED_OUT = 10, STALLED = 11, RELEASED = 12, PROMOTED = 13, FORGOTTEN = 14, PURGED = 15}
local KINDS = 15
local ENDS = {[KIND.COMPLETED] = true, [KIND.FAILED] = true, [KIND.CANCELLED] = true, [KIND.PURGED] = true}
local ENDS_A_WAIT = {[KIND.COMPLETED] = true, [KIND.FAILED] = true, [KIND.CANCELLED] = true, [KIND.PURGED] = true,
  [KIND.CANCEL_ASKED] = true, [KIND.FORGOTTEN] = true}
local MAKES_READY = {[KIND.ENQUEUED] = true, [KIND.PROMOTED] = true, [KIND.UPDATED] = true, [KIND.RETRIED] = true,
  [KIND.TIMED_OUT] = true, [KIND.STALLED] = true, [KIND.RELEASED] = true}

local MARK, LONG, CUSTOM_ID, PAYLOAD, FINISHED, TERMS = 160, 1, 2, 4, 8, 16 -- a record's flags; MARK is in all of them
local EXTENDED = 64 -- a flag of a record, of takes_payload in NEXT, of has_payload in a request, of priority in a follow-up
local OVERDUE, CANCEL_ASKED, NEXT, PROGRESS = 1, 2, 4, 8 -- a run's flags

-- The formats of a record, its LONG part and a lease, and where their fields begin. LONG_END is the first byte behind LONG.
-- HOLDER_AT is the place of the size of a worker's name, which the name follows.
local HEAD, LONG_PART, LEASE = '>BBI8I8', '<I8I8I4I4I4I4I8I8I4I4I4', '<BI8I4I8I2'
local FLAGS_AT, PRIORITY_AT, GENERATION_AT, RUN_AT_AT = 1, 2, 3, 11
local ARRIVAL_AT, RETRIES_AT, STALLS_AT, LONG_END = 19, 39, 43, 79
local FENCE_AT, LEASE_MS_AT, HOLDER_AT = 2, 10, 22

-- The fields of a queue's metadata by their position in META. The total of a kind is at TOTALS + kind. A `time` is the same
-- table: its first fields are the clock of the queue.
local LAST_AT, LAST_STAMP, SKEW, PAUSED, HAS_BRIEF, PRIORITIES = 2, 3, 4, 5, 6, 7
local FORGET_AT, RETRYING, DEFERRED_JOBS = 8, 9, 10
local TOTALS = DEFERRED_JOBS
local STEPS, REASON = TOTALS + KINDS + 1, TOTALS + KINDS + 2

-- Functions of the server, which do not exist yet while it loads the library. The first call sets them.
local call, pack, unpack_from, band, sub, byte, max, min

-- Per-call variables, set by `run` in calls.lua. SINGLE_NODE is true if this server has all keys. DATABASE is the end of the names of channels:
-- `@` and a number, or nothing in database 0.
local ARGS, QUEUE, CLIENT, DATABASE, WALL, SINGLE_NODE

local FIRST_ARG = 4 -- in ARGS, behind the verb, the client and its number

-- One table per file. A verb is a function without parameters that reads ARGS. REPEATS makes the reply to a repeated call
-- from the kept reply of the first; KEPT_AS makes the reply to keep.
local clock, record, arguments, lifecycle, metadata, transaction = {}, {}, {}, {}, {}, {}
local fast, enqueue, leases, calls = {}, {}, {}, {}
local VERBS, REPEATS, KEPT_AS = {}, {}, {}
