// A server of the live protocol in plain Node, written from docs/live-protocol.md alone: no packages, one thread.
//
//   node node_server.js unix:///path/to.sock | tcp://127.0.0.1:0
//
// The environment: a walker on a line starts at 0 (or where `options.start` says). Action 0 goes left, 1 stays, 2 goes
// right. It has arrived at 3, and gives up after ten steps. The observation is [position, steps left].
"use strict";
const net = require("node:net");

const VERSION = 1;
const MAX_FRAME_BYTES = 64 * 1024 * 1024;

// MessagePack, as much of it as there can be in a frame.

function encode(value) {
  const parts = [];
  write(value, parts);
  return Buffer.concat(parts);
}

function write(value, parts) {
  if (value === null || value === undefined) parts.push(Buffer.from([0xc0]));
  else if (value === false) parts.push(Buffer.from([0xc2]));
  else if (value === true) parts.push(Buffer.from([0xc3]));
  else if (typeof value === "number") parts.push(number(value));
  else if (typeof value === "string") {
    const bytes = Buffer.from(value, "utf8");
    parts.push(head(bytes.length, [[31, 0xa0]], [0xd9, 0xda, 0xdb]), bytes);
  } else if (Buffer.isBuffer(value)) parts.push(head(value.length, [], [0xc4, 0xc5, 0xc6]), value);
  else if (Array.isArray(value)) {
    parts.push(head(value.length, [[15, 0x90]], [null, 0xdc, 0xdd]));
    for (const item of value) write(item, parts);
  } else {
    const entries = Object.entries(value);
    parts.push(head(entries.length, [[15, 0x80]], [null, 0xde, 0xdf]));
    for (const [key, item] of entries) {
      write(key, parts);
      write(item, parts);
    }
  }
}

function head(size, fixed, [one, two, four]) {
  for (const [most, base] of fixed) if (size <= most) return Buffer.from([base | size]);
  if (one !== null && size < 0x100) return Buffer.from([one, size]);
  const bytes = Buffer.alloc(size < 0x10000 ? 3 : 5);
  bytes[0] = size < 0x10000 ? two : four;
  bytes.writeUIntBE(size, 1, bytes.length - 1);
  return bytes;
}

function number(value) {
  if (Number.isInteger(value) && value >= 0 && value < 128) return Buffer.from([value]);
  if (Number.isInteger(value) && value >= -32 && value < 0) return Buffer.from([0x100 + value]);
  const bytes = Buffer.alloc(9);
  if (Number.isSafeInteger(value)) {
    bytes[0] = 0xd3;
    bytes.writeBigInt64BE(BigInt(value), 1);
  } else {
    bytes[0] = 0xcb;
    bytes.writeDoubleBE(value, 1);
  }
  return bytes;
}

class Decoder {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  take(size) {
    if (this.at + size > this.bytes.length) throw new Error("the body ends too early");
    this.at += size;
    return this.bytes.subarray(this.at - size, this.at);
  }

  size(bytes) {
    return this.take(bytes).readUIntBE(0, bytes);
  }

  value() {
    const tag = this.size(1);
    if (tag < 0x80) return tag;
    if (tag < 0x90) return this.map(tag & 15);
    if (tag < 0xa0) return this.list(tag & 15);
    if (tag < 0xc0) return this.take(tag & 31).toString("utf8");
    if (tag >= 0xe0) return tag - 0x100;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.take(this.size(1 << (tag - 0xc4)));
      case 0xca: return this.take(4).readFloatBE(0);
      case 0xcb: return this.take(8).readDoubleBE(0);
      case 0xcc: case 0xcd: case 0xce: return this.size(1 << (tag - 0xcc));
      case 0xcf: return Number(this.take(8).readBigUInt64BE(0));
      case 0xd0: case 0xd1: case 0xd2: return this.take(1 << (tag - 0xd0)).readIntBE(0, 1 << (tag - 0xd0));
      case 0xd3: return Number(this.take(8).readBigInt64BE(0));
      case 0xd9: case 0xda: case 0xdb: return this.take(this.size(1 << (tag - 0xd9))).toString("utf8");
      case 0xdc: case 0xdd: return this.list(this.size(2 << (tag - 0xdc)));
      case 0xde: case 0xdf: return this.map(this.size(2 << (tag - 0xde)));
      default: throw new Error(`the byte ${tag} is not used`);
    }
  }

  list(size) {
    return Array.from({ length: size }, () => this.value());
  }

  map(size) {
    return Object.fromEntries(Array.from({ length: size }, () => [this.value(), this.value()]));
  }
}

function send(socket, message) {
  const body = encode(message);
  const header = Buffer.alloc(4);
  header.writeUInt32BE(body.length, 0);
  socket.write(Buffer.concat([header, body]));
}

// The environment, and what it answers.

class Walker {
  reset(options) {
    this.position = options?.start ?? 0;
    this.left = 10;
    return this.seen();
  }

  step(action) {
    this.position += action - 1;
    this.left -= 1;
    return { obs: this.seen(), terminated: this.position >= 3, truncated: this.left === 0 };
  }

  seen() {
    // Once as lists and once as an array, for both are allowed.
    if (this.left % 2 === 0) return [this.position, this.left];
    const data = Buffer.alloc(8);
    data.writeFloatLE(this.position, 0);
    data.writeFloatLE(this.left, 4);
    return { nd: "float32", shape: [2], data };
  }
}

function answer(walker, request) {
  switch (request.type) {
    case "reset":
      return { type: "state", obs: walker.reset(request.options), info: { seed: request.seed } };
    case "step": {
      if (![0, 1, 2].includes(request.action)) {
        return { type: "error", kind: "action", message: `action: ${request.action} is not one of 0, 1, 2` };
      }
      const { obs, terminated, truncated } = walker.step(request.action);
      const reward = terminated ? 1 : -0.1;
      return { type: "result", obs, reward, terminated, truncated, info: { where: "Malmö" } };
    }
    case "ping":
      return { type: "pong" };
    default:
      throw new Error(`there is no request ${request.type}`);
  }
}

const WELCOME = {
  type: "welcome",
  version: VERSION,
  name: "node walker",
  observation_space: { type: "Box", shape: [2], dtype: "float32", low: [-10, 0], high: [10, 10] },
  action_space: { type: "Discrete", n: 3 },
};

function serve(socket) {
  const walker = new Walker();
  let held = Buffer.alloc(0);
  let greeted = false;
  socket.setNoDelay(true);
  socket.on("error", () => socket.destroy());
  socket.on("data", (piece) => {
    held = Buffer.concat([held, piece]);
    try {
      while (held.length >= 4) {
        const size = held.readUInt32BE(0);
        if (size > MAX_FRAME_BYTES) throw new Error(`a frame of ${size} bytes`);
        if (held.length < 4 + size) return;
        const request = new Decoder(held.subarray(4, 4 + size)).value();
        held = held.subarray(4 + size);
        if (greeted && request.type === "close") return socket.end();
        if (greeted) send(socket, answer(walker, request));
        else if (request.type !== "hello") throw new Error("hello comes first");
        else if (request.version !== VERSION) {
          send(socket, { type: "error", kind: "version", message: `this server speaks version ${VERSION}` });
          return socket.end();
        } else {
          greeted = true;
          send(socket, WELCOME);
        }
      }
    } catch (error) {
      send(socket, { type: "error", kind: "malformed", message: error.message });
      socket.end();
    }
  });
}

const address = process.argv[2];
const server = net.createServer(serve);
const where = address.startsWith("unix://")
  ? { path: address.slice("unix://".length) }
  : { host: new URL(address).hostname, port: Number(new URL(address).port) };
server.listen(where, () => {
  const bound = server.address();
  console.log(typeof bound === "string" ? `unix://${bound}` : `tcp://${bound.address}:${bound.port}`);
});
