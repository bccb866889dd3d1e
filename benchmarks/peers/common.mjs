// What the Node adapters share: marks, and the loops that are the same for all. See common.py, which this mirrors.
//
// An adapter is copied beside the node_modules that the command has installed for it, with this file, and started with
// its role as the one argument.

import fs from 'node:fs'
import path from 'node:path'
import readline from 'node:readline'

export const URL_ = process.env.BENCH_URL
export const AT_ONCE = 100
export const role = process.argv[2]
const BULK = 1000
const PAUSE_MS = [20, 60]
const FLUSH_MS = 5
const PAD = 'x'.repeat(64)

export const job = (n) => ({ n, pad: PAD })

// Number and time of each job that has begun. Written together every few milliseconds, not one by one: the cost of a
// mark must not be a part of what is measured.
let marks = []
let file

export function mark(n) {
  marks.push(n, process.hrtime.bigint())
  if (marks.length === 2) setTimeout(flush, FLUSH_MS)
}

function flush() {
  file ??= fs.openSync(path.join(process.env.BENCH_FOLDER, `marks-${process.pid}`), 'a')
  const bytes = Buffer.allocUnsafe(marks.length * 8)
  marks.forEach((value, place) => bytes.writeBigInt64LE(BigInt(value), place * 8))
  marks = []
  fs.writeSync(file, bytes)
}

export async function atOnce(step, first, count) {
  let next = first
  const oneOfMany = async () => {
    while (next < first + count) await step(next++)
  }
  await Promise.all(Array.from({ length: AT_ONCE }, oneOfMany))
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const numbers = (first, count) => Array.from({ length: count }, (_, place) => first + place)

const verbs = {
  async enqueue(client, first, count) {
    for (const n of numbers(first, count)) await client.enqueue(n)
  },
  async bulk(client, first, count) {
    if (!client.bulk) return atOnce((n) => client.enqueue(n), first, count)
    for (let done = 0; done < count; done += BULK) {
      await client.bulk(numbers(first + done, Math.min(BULK, count - done)))
    }
  },
  async call(client, first, count) {
    const times = []
    for (const n of numbers(first, count)) {
      const began = performance.now()
      await client.call(n)
      times.push((performance.now() - began) / 1000)
    }
    return { times }
  },
  async calls(client, first, count) {
    await atOnce((n) => client.call(n), first, count)
  },
  async pickup(client, first, count) {
    const asked = []
    for (const n of numbers(first, count)) {
      await sleep(PAUSE_MS[0] + Math.random() * (PAUSE_MS[1] - PAUSE_MS[0]))
      asked.push(Number(process.hrtime.bigint()))
      await client.enqueue(n)
    }
    return { asked }
  },
}

const version = (name) => JSON.parse(fs.readFileSync(path.join('node_modules', name, 'package.json'))).version
const say = (answer) => process.stdout.write(JSON.stringify(answer) + '\n')

export async function serve(client, ...packages) {
  const versions = { node: process.versions.node }
  for (const name of packages) versions[name] = version(name)
  say({ versions, can: { enqueue: true, bulk: client.bulk ? 'in bulk' : `${AT_ONCE} at once`, call: true } })
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const ask = JSON.parse(line)
    const [began, cpu] = [performance.now(), process.cpuUsage()]
    const extra = await verbs[ask.do](client, ask.first, ask.count)
    const used = process.cpuUsage(cpu)
    say({ seconds: (performance.now() - began) / 1000, cpu_s: (used.user + used.system) / 1e6, ...extra })
  }
  process.exit(0)
}
