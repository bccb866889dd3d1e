// @platformatic/job-queue on Node. It has no bulk verb, but its client puts concurrent commands into one write.

import { Queue, RedisStorage } from '@platformatic/job-queue'
import { AT_ONCE, URL_, job, mark, role, serve } from './common.mjs'

const storage = new RedisStorage({ url: URL_ })
const queue = new Queue({ storage, concurrency: AT_ONCE })

if (role === 'worker') {
  queue.execute(async ({ payload }) => {
    mark(payload.n)
    return true // undefined would be run again, and null never be told to who waits
  })
  await queue.start()
} else {
  await queue.start()
  const client = {
    enqueue: (n) => queue.enqueue(`job-${n}`, job(n)),
    call: (n) => queue.enqueueAndWait(`job-${n}`, job(n), { timeout: 30_000 }),
  }
  await serve(client, '@platformatic/job-queue', 'iovalkey')
}
