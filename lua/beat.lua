-- beat.lua: count a node in, or out, and the nodes that are there.  O(log nodes)
-- KEYS[1]  "<prefix>{nodes}", a sorted set: the ids, by when each was last heard
--          of, in ms of this server's clock
-- KEYS[2]  "<prefix>{nodes}:gen", the generation of that set: another one
--          whenever a node joined, left or lapsed
-- ARGV     id, ttl_ms: how long a node counts that is not heard of,
--          the generation that the caller knows or 0, leave (0 or 1)
-- returns  nodes, generation (from 1)
-- then     the id of every node, unless the caller knows the generation

local EXACT = 9007199254740992
local SLACK_MS = 1000
local id, ttl, known, leave = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'

local clock = redis.call('TIME')
local now_us = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local now = math.floor(now_us / 1000)

local function int(n) return string.format('%.0f', n) end

-- 1. Who lapsed. What is no sorted set has no nodes in it and goes too.
local changes = redis.pcall('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. int(now - ttl))
if type(changes) == 'table' then
  if not string.find(changes.err, 'WRONGTYPE', 1, true) then return changes end
  redis.call('DEL', KEYS[1])
  changes = 1
end
-- After a step back of the clock the others seem to be heard of in the future,
-- the dead among them too: they all have a ttl from now on.
for _, ahead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. int(now), '+inf')) do
  redis.call('ZADD', KEYS[1], int(now), ahead)
end

-- 2. The caller.
if leave then
  changes = changes + redis.call('ZREM', KEYS[1], id)
else
  changes = changes + redis.call('ZADD', KEYS[1], int(now), id)
end

-- 3. The generation. The time is in it, so that one counted anew, after a flush
-- or on a replica that had not seen the last one, is none that anybody knows.
local digits = string.match(redis.call('MGET', KEYS[2])[1] or '', '^%d+$')
local gen = tonumber(digits or '0') or 0
if gen >= EXACT then gen = 0 end
if changes > 0 or gen == 0 then gen = math.max(1, now_us, gen + 1) end

local px = int(2 * ttl + SLACK_MS)
redis.call('SET', KEYS[2], int(gen), 'PX', px)
redis.call('PEXPIRE', KEYS[1], px)

local reply = { redis.call('ZCARD', KEYS[1]), gen }
if gen ~= known then
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do reply[#reply + 1] = member end
end
return reply
