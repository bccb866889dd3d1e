// BullMQ on Node. Finished jobs are kept for their waiters, but no more than a few thousand of them.

import { Queue, QueueEvents, Worker } from 'bullmq'
import IORedis from 'ioredis'
import { AT_ONCE, URL_, job, mark, role, serve } from './common.mjs'

const connection = () => new IORedis(URL_, { maxRetriesPerRequest: null })
const options = { removeOnComplete: 5000 }
const WAIT_MS = 30_000

if (role === 'worker') {
  new Worker('bench', async ({ data }) => mark(data.n), { connection: connection(), concurrency: AT_ONCE })
} else {
  const queue = new Queue('bench', { connection: connection(), defaultJobOptions: options })
  const events = new QueueEvents('bench', { connection: connection() })
  await queue.waitUntilReady()
  await events.waitUntilReady()
  const client = {
    enqueue: (n) => queue.add('nothing', job(n)),
    bulk: (numbers) => queue.addBulk(numbers.map((n) => ({ name: 'nothing', data: job(n) }))),
    call: async (n) => (await queue.add('nothing', job(n))).waitUntilFinished(events, WAIT_MS),
  }
  await serve(client, 'bullmq', 'ioredis')
}
