// A worker in plain Node without packages: docs/reference/wire.md as a program. It completes every job of a queue with
// the `text` of its payload in capitals, after `seconds` of work.
//
//   node wire_worker.mjs HOST:PORT QUEUE LIBRARY [NAMESPACE [LEASE_MS]]
import net from "node:net";
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

const [place, queue, file, namespace = "hf", lease = "10000"] = process.argv.slice(2);
const [host, port] = place.split(":");
const library = readFileSync(file, "utf8");
const name = library.match(/^#!lua name=(\w+)/)[1];
const key = `{${namespace}/${queue}}`, leaseMs = Number(lease), worker = `node-${process.pid}`;
const client = randomBytes(9).toString("base64url"), numbers = {};

// One connection, one command at a time. If it breaks, the same command goes out again: its number makes that safe.
let socket, chunks, buffer, last = Promise.resolve();
const send = (...args) => (last = last.then(() => exchange(args.map((arg) => (Buffer.isBuffer(arg) ? arg : Buffer.from(`${arg}`))))));

async function exchange(args) {
  for (let pause = 50; ; pause = Math.min(2 * pause, 1000)) {
    try {
      if (!socket) [socket, buffer] = [net.connect(port, host), Buffer.alloc(0)];
      chunks ??= socket[Symbol.asyncIterator]();
      socket.write(Buffer.concat([Buffer.from(`*${args.length}\r\n`), ...args.flatMap((arg) => [Buffer.from(`$${arg.length}\r\n`), arg, Buffer.from("\r\n")])]));
      return await reply();
    } catch (error) {
      console.log("again", error.message);
      socket = chunks = void socket.destroy();
      await sleep(pause);
    }
  }
}

async function reply() {
  const line = String(await take(() => buffer.indexOf("\r\n") + 2)).trimEnd(), rest = line.slice(1), size = Number(rest);
  if (line[0] === "+") return rest;
  if (line[0] === "-") return new Error(rest);
  if (line[0] === ":" || size < 0) return size;
  if (line[0] === "$") return (await take(() => (buffer.length < size + 2 ? 1 : size + 2))).subarray(0, size);
  const list = [];
  while (list.length < size) list.push(await reply());
  return list;
}

async function take(end) { // The bytes up to `end`, which is 1 while they are not all there.
  while (end() === 1) {
    const { value, done } = await chunks.next();
    if (done) throw new Error("the connection is closed");
    buffer = Buffer.concat([buffer, value]);
  }
  const taken = buffer.subarray(0, end());
  buffer = buffer.subarray(taken.length);
  return taken;
}

async function call(verb, ...args) {
  numbers[verb] = (numbers[verb] ?? 0) + 1;
  const command = ["FCALL", name, 1, `${key}:meta`, verb, client, numbers[verb], ...args];
  let answer = await send(...command);
  if (answer instanceof Error && answer.message.includes("Function not found")) {
    await send("FUNCTION", "LOAD", library);
    answer = await send(...command);
  }
  if (answer instanceof Error) throw answer;
  return answer;
}

function payloadOf(record) { // What stands before it depends on the flags in the first byte.
  let at = 18;
  if (record[0] & 1) at += 60 + Math.max(record.readUInt32LE(66) - 1, 0) + record.readUInt32LE(70) + record.readUInt32LE(74);
  if (record[0] & 16) at += 2 + record.readUInt16LE(at);
  return record.subarray(at);
}

function head(kind, fence, first, second, counts) { // of a settlement
  const bytes = Buffer.alloc(27);
  [fence, first, second].forEach((number, at) => bytes.writeBigUInt64LE(BigInt(number), 1 + 8 * at));
  [bytes[0], bytes[25], bytes[26]] = [kind, 1, counts];
  return bytes;
}

async function run(id, record, fence) {
  let held = true, item;
  const beat = setInterval(async () => (held &&= `${await call("extend", worker, leaseMs, id, fence, "")}` !== "l"), leaseMs / 4);
  try {
    const { text, seconds = 0 } = JSON.parse(payloadOf(record));
    for (const until = Date.now() + 1000 * seconds; held && Date.now() < until; ) await sleep(10);
    item = [head(1, fence, 3600000, 3600000, 0), JSON.stringify(text.toUpperCase()), "json"];
  } catch (error) { // Again in 5 s. How often is for the worker to say: the storage only counts.
    item = [head(3, fence, 5000, 0, 1), JSON.stringify({ type: error.name, message: error.message }), ""];
  }
  clearInterval(beat);
  if (!held) return console.log("lost", `${id}`, "by extend");
  const [, settled] = await call("settle", worker, id, ...item);
  console.log(`${settled}` === "1" ? "settled" : "lost", `${id}`, "by settle");
}

console.log("serves", queue, "as", worker);
for (;;) {
  const [, , , , [id, record], fences] = await call("claim", 1, worker, leaseMs);
  if (!id) await send("BLPOP", `${key}:wake`, 1);
  else {
    console.log("claimed", `${id}`, `${fences.readBigUInt64LE()}`);
    await run(id, record, fences.readBigUInt64LE());
  }
}
