// BullMQ on Node.

import { Queue, QueueEvents, Worker } from 'bullmq'
import IORedis from 'ioredis'
import { AT_ONCE, URL_, job, mark, role, serve } from './common.mjs'

const connection = () => new IORedis(URL_, { maxRetriesPerRequest: null })
const WAIT_MS = 30_000
const LISTENING_MS = 500

// Only once it is needed, since it hears of every job. It says that it is ready before it listens: give it time.
async function listening() {
  const events = new QueueEvents('bench', { connection: connection() })
  await events.waitUntilReady()
  await new Promise((resolve) => setTimeout(resolve, LISTENING_MS))
  return events
}

if (role === 'worker') {
  new Worker('bench', async ({ data }) => mark(data.n), { connection: connection(), concurrency: AT_ONCE })
} else {
  const queue = new Queue('bench', { connection: connection() })
  await queue.waitUntilReady()
  let events
  const client = {
    enqueue: (n) => queue.add('nothing', job(n)),
    bulk: (numbers) => queue.addBulk(numbers.map((n) => ({ name: 'nothing', data: job(n) }))),
    call: async (n) => {
      events ??= listening()
      const heard = await events
      return (await queue.add('nothing', job(n))).waitUntilFinished(heard, WAIT_MS)
    },
  }
  await serve(client, 'bullmq', 'ioredis')
}
