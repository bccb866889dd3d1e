-- Layout 3. Every table is prefixed, so that Holdfast can live in a file of yours.
-- Times are integer microseconds in the queue's time (see _core/clock.py).

CREATE TABLE IF NOT EXISTS holdfast_meta (
  key   TEXT PRIMARY KEY,                 -- 'layout': the version of all this; 'floor': the highest stamp of any queue that was dropped
  value INTEGER NOT NULL
);

CREATE TABLE IF NOT EXISTS holdfast_queues (
  queue     INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice
  namespace TEXT NOT NULL,
  name      TEXT NOT NULL,
  meta      BLOB NOT NULL,                -- msgpack of QueueMeta: the queue's time, counts, totals, pause, earliest forget time
  UNIQUE (namespace, name)
);

-- One row per job. The columns are what indexes and counts need; `rest` is the rest of the record, as msgpack.
CREATE TABLE IF NOT EXISTS holdfast_jobs (
  job      INTEGER PRIMARY KEY,
  queue    INTEGER NOT NULL,
  id       BLOB NOT NULL CHECK (typeof(id) = 'blob'),
  state    TEXT NOT NULL,                 -- waiting, running, completed, failed, cancelled; or brief: completed, and kept only for its handle
  view     TEXT,                          -- retrying, deferred
  priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 9),  -- higher first
  run_at   INTEGER NOT NULL,
  arrival  INTEGER NOT NULL,
  until_at INTEGER,                       -- running: the lease's deadline; finished: the forget time; waiting: NULL
  worker   TEXT,                          -- running: who holds the lease
  payload  BLOB,
  rest     BLOB NOT NULL,
  UNIQUE (queue, id)
);

-- A job is in exactly one of these two.
CREATE INDEX IF NOT EXISTS holdfast_waiting ON holdfast_jobs (queue, priority, run_at, arrival) WHERE until_at IS NULL;
CREATE INDEX IF NOT EXISTS holdfast_until ON holdfast_jobs (queue, state, until_at, id) WHERE until_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS holdfast_workers (
  namespace TEXT NOT NULL,
  worker    TEXT NOT NULL,
  stats     BLOB NOT NULL,                -- msgpack, compressed if long: what the worker announced, and until when that holds
  PRIMARY KEY (namespace, worker)
) WITHOUT ROWID;

-- Small values that workers and commands leave for each other.
CREATE TABLE IF NOT EXISTS holdfast_notes (
  namespace TEXT NOT NULL,
  name      TEXT NOT NULL,
  value     BLOB NOT NULL,
  forget_at INTEGER NOT NULL,             -- wall clock
  PRIMARY KEY (namespace, name)
) WITHOUT ROWID;

-- Listeners: the datagram sockets of the processes on this file, and the events that each wants.
CREATE TABLE IF NOT EXISTS holdfast_listeners (
  address TEXT NOT NULL,
  queue   TEXT NOT NULL,                  -- namespace/name
  topic   TEXT NOT NULL,                  -- ready, ends, all
  PRIMARY KEY (address, queue, topic)
) WITHOUT ROWID;
